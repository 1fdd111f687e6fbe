"""Settings of the reward `judge`: the model, its address, the question, and the format of the grade."""

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
"""Pattern of a placeholder in a template, such as {answer}. Other braces are text."""


class JudgeSettings(ExtractingSettings):
    """The reward is the grade of a model behind an OpenAI-compatible API, scaled to 0 (worst) to 1 (best)."""

    model: str = Field(min_length=1)
    """Name of the model at that server."""
    base_url: Annotated[str | EnvironmentReference, BeforeValidator(refuse_plain_url)]
    """URL of the API including /v1, or { env = "NAME" } for a URL in an environment variable."""
    api_key: Annotated[EnvironmentReference | BlockReference | None, BeforeValidator(refuse_plain_key)] = None
    """API key, as a reference: { env = "NAME" }; unset: the server needs no key."""
    template: Annotated[str, AfterValidator(partial(normalize, "NFC"))] = Field(min_length=1)
    """The question. {completion}, {answer} and {COLUMN} are replaced; the judge sees no images."""
    system: str = ""
    """System message; empty: no system message."""
    after: str = "Grade:"
    """The grade follows the last occurrence of this text in the reply; empty: the reply is the grade."""
    json_key: str | None = None
    """Read the grade from this key of the last JSON object in the reply, instead of the text after `after`."""
    verdicts: dict[str, float] = Field({})
    """Grades of words in the reply, such as {yes = 1, no = 0}; empty: the reply has a number."""
    worst: float = 0.0
    """The grade that gives reward 0; a grade beyond it is invalid."""
    best: float = 1.0
    """The grade that gives reward 1; a grade beyond it is invalid."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    max_tokens: PositiveInt = 512
    """Longest reply, in tokens."""
    extra_body: Annotated[dict[str, Any], BeforeValidator(refuse_plain_variables)] = Field({})
    """Further fields of the request, for server-specific options."""
    timeout: PositiveFloat = Field(60.0, le=3600)
    """Seconds for one request."""
    attempts: PositiveInt = Field(5, le=100)
    """Most requests for one grade: a request is repeated after a timeout, status 429 or 5xx, or a lost connection."""
    longest_wait: PositiveFloat = 30.0
    """Most seconds between two attempts. If the server asks to wait longer, the rollout fails."""

    @model_validator(mode="after")
    def _check_question_and_grades(self) -> Self:
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
        """Return True if the number lies between `worst` and `best`."""
        return min(self.worst, self.best) <= number <= max(self.worst, self.best)


def check_url(url: str) -> None:
    """Check that `url` can be the base URL of an API. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r:.200} is not a URL such as https://api.example.org/v1")
