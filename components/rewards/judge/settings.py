"""Who is asked, what, and how the grade is read."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Self
from unicodedata import normalize
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from armature.components.contracts.secrets import (
    BlockReference,
    EnvironmentReference,
    refuse_plain_key,
    refuse_plain_url,
    refuse_plain_variables,
)
from armature.components.rewards.reward import ExtractingSettings

PLACE = re.compile(r"\{([^\W\d]\w*)\}")
"""A place in a template; other braces are text."""


class JudgeSettings(ExtractingSettings):
    """The grade of a model behind an OpenAI-compatible address, from 0 for the worst grade to 1 for the best."""

    model: str = Field(min_length=1)
    """Name of the model there."""
    base_url: Annotated[str | EnvironmentReference, BeforeValidator(refuse_plain_url)]
    """Address up to and with /v1, or { env = "NAME" }: the variable that holds it."""
    api_key: Annotated[EnvironmentReference | BlockReference | None, BeforeValidator(refuse_plain_key)] = None
    """Where its key is: { env = "NAME" }; unset: it needs none."""
    template: Annotated[str, AfterValidator(partial(normalize, "NFC"))] = Field(min_length=1)
    """What it is asked. {completion}, {answer} and {COLUMN} are replaced; it is shown no images."""
    system: str = ""
    """The system message; empty: none."""
    after: str = "Grade:"
    """The grade follows the last of these in the reply; empty: the reply is the grade."""
    json_key: str | None = None
    """Instead: the grade is under this key of the last JSON object in the reply."""
    verdicts: dict[str, float] = Field({})
    """Grades by the word that is said: {yes = 1, no = 0}; empty: numbers are said."""
    worst: float = 0.0
    """The grade that is worth 0; one beyond it is no grade."""
    best: float = 1.0
    """The grade that is worth 1."""
    temperature: NonNegativeFloat = 0.0
    """Of its sampling."""
    max_tokens: PositiveInt = 512
    """Longest reply."""
    extra_body: Annotated[dict[str, Any], BeforeValidator(refuse_plain_variables)] = Field({})
    """More fields of the request, as the server knows them."""
    timeout: PositiveFloat = Field(60.0, le=3600)
    """Seconds for one request."""
    attempts: PositiveInt = Field(5, le=100)
    """Requests for one grade, when it answers too late, with 429 or 5xx, or not at all."""
    longest_wait: PositiveFloat = 30.0
    """Most seconds between two of them; who is told to wait longer gives up."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if isinstance(self.base_url, str):
            check_url(self.base_url)
        if "completion" not in PLACE.findall(self.template):
            raise ValueError("template has no {completion}")
        if self.worst == self.best:
            raise ValueError("worst and best are the same grade")
        outside = [word for word, grade in self.verdicts.items() if not self.is_grade(grade)]
        if outside:
            raise ValueError(f"the grade of {outside[0]!r} is not between worst and best")
        return self

    def is_grade(self, number: float) -> bool:
        return min(self.worst, self.best) <= number <= max(self.worst, self.best)


def check_url(url: str) -> None:
    """Raises ValueError if it is not the address of an API."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r:.200} is not an address such as https://api.example.org/v1")
