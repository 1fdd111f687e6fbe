"""Settings of the environment `gymnasium`: the environment to make, what the policy is shown, and how it acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from armature.components.contracts.settings import Settings
from armature.components.environments.dataset.template import parse_template
from armature.components.environments.generated import bare_answer
from armature.components.rewards.reward import EXTRACT

SEED = "{seed}"
"""Text in `make` that is replaced by the task's seed."""


class CallSettings(Settings):
    """A function or class with its arguments. A text "module:name" is one without arguments."""

    call: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Function or class as MODULE:NAME, of an installed package or of a module beside the recipe."""
    args: dict[str, Any] = Field({})
    """Its keyword arguments."""


Call = Annotated[CallSettings, BeforeValidator(lambda value: {"call": value} if isinstance(value, str) else value)]


class GymnasiumSettings(Settings):
    """Settings of the environment `gymnasium`.

    Example:
        >>> settings = GymnasiumSettings(id="FrozenLake-v1", actions=("left", "down", "right", "up"), max_turns=16)
        >>> settings.image, settings.success
        ('render', 'reward > 0')
    """

    id: str = Field(min_length=1)
    """Name under which the environment is registered, such as FrozenLake-v1."""
    modules: tuple[str, ...] = ()
    """Modules to import first, which register further names: minigrid, or a module beside the recipe."""
    make: dict[str, Any] = Field({})
    """Arguments of the environment. "{seed}" is replaced by the task's seed, and a table { call = "module:function",
    args = {...} } by the function's result."""
    wrappers: tuple[Call, ...] = ()
    """Wrappers around the environment, the innermost first: "minigrid.wrappers:FullyObsWrapper" or { call = "...",
    args = {...} }."""
    image: str = Field("render", pattern=r"^(none|render|obs(\..+)?)$")
    """Image to show: render for the rendered frame, obs for an observation that is an image, obs.KEY for an entry of
    it, none for no image."""
    image_size: int | None = Field(None, ge=8, le=2048)
    """Width and height in pixels to which the image is scaled; unset keeps its size."""
    system_prompt: str | None = None
    """System message for the policy; unset for none."""
    prompt: str = "{image}"
    """Template of what the policy is shown in every turn: {image}, {mission} and other entries of the observation,
    {obs} for one without entries, {info.KEY}."""
    dialogue: bool = True
    """Show the whole conversation so far; false shows the current turn alone, which is enough if it shows the state."""
    actions: tuple[str, ...] = ()
    """Names of the actions in their order, as the policy writes them. Left out for an environment whose actions are
    texts."""
    extract: str = Field("all", pattern=EXTRACT)
    """Part of an answer that holds the action, as for rewards: all, boxed, <action>, </think>."""
    actions_per_turn: PositiveInt = 1
    """Most actions in an answer, separated by commas, semicolons or line breaks."""
    max_turns: PositiveInt
    """Turns after which an episode ends."""
    success: str = Field("reward > 0", pattern=r"^(terminated|info\.[\w.]+|reward >=? -?\d+(\.\d+)?)$")
    """Rule by which an episode that the environment has ended is a success: a bound on the sum of its rewards, such as
    reward >= 195; terminated; or info.KEY for an entry that is true."""
    anchor: Literal["shown", "observation"] = "shown"
    """State by which GiGPO compares turns of a group: what the policy is shown, or the environment's observation."""
    reward_weight: float = 1.0
    """Weight of the environment's rewards."""
    success_weight: float = 0.0
    """Weight of a success."""
    expert: str | None = Field(None, pattern=r"^[\w.]+:[\w.]+$")
    """Function that plays for a warm start, as MODULE:NAME. It is called with the environment after its reset and
    yields actions, which are played one a turn and written as `extract` takes them. Unset: there are no
    demonstrations."""
    same_start: bool = False
    """Allow an environment that begins alike for every seed, so that held-out tasks are the training tasks."""
    call_timeout: PositiveFloat = Field(60.0, le=3600)
    """Seconds that the environment may take for one turn, and the expert for a game. One that takes longer is ended,
    and its rollout is lost."""

    @field_validator("prompt")
    @classmethod
    def _check_template(cls, prompt: str) -> str:
        parse_template(prompt)
        return prompt

    @field_validator("make")
    @classmethod
    def _check_calls(cls, make: dict[str, Any]) -> dict[str, Any]:
        for table in call_tables(make):
            try:
                CallSettings.model_validate(table)
            except ValidationError as error:
                raise PydanticCustomError(
                    "call_table_wrong",
                    'a table with call may contain only call = "module:function" and args = {...}, not '
                    + f"{table!r:.200}",
                ) from error
        return make

    @field_validator("actions")
    @classmethod
    def _check_names(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
        bare = [bare_answer(name) for name in actions]
        if "" in bare or len(set(bare)) < len(bare) or any(set(name) & set(",;\n") for name in actions):
            raise PydanticCustomError(
                "action_names_unclear",
                "names of actions have a letter or digit and no comma or semicolon, and differ by more than case",
            )
        return actions

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if (self.image != "none") != parse_template(self.prompt).places:
            raise PydanticCustomError(
                "image_places_mismatch", 'prompt needs a place {image} exactly if image is not "none"'
            )
        if self.actions_per_turn > 1 and not self.actions:
            raise PydanticCustomError(
                "several_texts", "actions_per_turn needs names in actions: only named actions can be told apart"
            )
        return self


def call_tables(value: Any) -> list[Mapping[str, Any]]:
    """Return all tables in arguments that are calls, also those in the arguments of calls."""
    if isinstance(value, list | tuple):
        return [table for each in value for table in call_tables(each)]
    if not isinstance(value, Mapping):
        return []
    return [*([value] if "call" in value else []), *call_tables(list(value.values()))]
