"""The form of a completion: its length, and its tags."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from armature.components.rewards.extract import ExtractingSettings, extracted
from armature.components.rewards.reward import Reward, RewardInput
from armature.components.rewards.settings import NamedReward


class LengthSettings(ExtractingSettings):
    """1 between the bounds; outside, 0, or falling linearly to 0."""

    unit: Literal["characters", "words"] = Field(
        "characters", description="What is counted. The bound on tokens is rollouts.sampling.max_tokens."
    )
    at_least: NonNegativeInt = Field(0, description="Shortest length that is worth 1.")
    at_most: NonNegativeInt | None = Field(None, description="Longest length that is worth 1; unset: no bound.")
    slope: NonNegativeInt = Field(
        0, description="Over how many more, or fewer, the reward falls to 0; 0: at once, a hard bound."
    )

    @model_validator(mode="after")
    def _a_bound_that_can_be_met(self) -> Self:
        if self.at_most is None and not self.at_least:
            raise ValueError("neither at_least nor at_most is set: every length would be worth 1")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most = {self.at_most} is below at_least = {self.at_least}")
        return self


class Length(Reward[LengthSettings]):
    """Does not look at the answer. What `extract` does not find has length 0."""

    Settings: ClassVar = LengthSettings

    def grade(self, given: RewardInput) -> float:
        text = extracted(given.completion, self._settings.extract) or ""
        length = len(text.split()) if self._settings.unit == "words" else len(text)
        beyond = max(self._settings.at_least - length, 0)
        if self._settings.at_most is not None:
            beyond = max(beyond, length - self._settings.at_most)
        return max(0.0, 1.0 - beyond / self._settings.slope) if self._settings.slope else float(beyond == 0)


class FormatTagsSettings(NamedReward):
    """1 if the completion is these tags, in this order, each once and with something in it, and nothing else."""

    tags: tuple[str, ...] = Field(("think", "answer"), min_length=1, max_length=20, description="Names of the tags.")
    first_is_open: bool = Field(
        False, description="The prompt ends with the first tag already, as templates of some thinking models do."
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        for tag in self.tags:
            if not tag or not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{tag!r:.100} is not the name of a tag; write answer for <answer>")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError("a tag is named twice")
        return self


class FormatTags(Reward[FormatTagsSettings]):
    """Does not look at the answer."""

    Settings: ClassVar = FormatTagsSettings

    def grade(self, given: RewardInput) -> float:
        text = f"<{self._settings.tags[0]}>" * self._settings.first_is_open + given.completion
        for tag in self._settings.tags:
            start, end = f"<{tag}>", f"</{tag}>"
            if text.count(start) != 1 or text.count(end) != 1:
                return 0.0
        for tag in self._settings.tags:
            before, _, rest = text.partition(f"<{tag}>")
            inside, closed, text = rest.partition(f"</{tag}>")
            if before.strip() or not closed or not inside.strip():
                return 0.0
        return float(not text.strip())
