"""Settings of the environment `openenv`: the server, the prompt from its observations, and the action format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.secrets import (
    BlockReference,
    EnvironmentReference,
    refuse_plain_key,
    refuse_plain_url,
)
from armature.components.contracts.settings import Settings
from armature.components.environments.dataset.template import parse_template
from armature.components.rewards.reward import EXTRACT

PORT = "{port}"
COMPLETION = "{completion}"


class OpenEnvSettings(Settings):
    """Settings of the environment `openenv`: the address of a running OpenEnv server, or a command that starts one."""

    base_url: Annotated[str | None, BeforeValidator(refuse_plain_url)] = Field(
        None, pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$"
    )
    """Address of a running server, such as http://127.0.0.1:8000. Set either this or command."""
    api_key: Annotated[EnvironmentReference | BlockReference | None, BeforeValidator(refuse_plain_key)] = None
    """Reference to the bearer token of that server: { env = "NAME" }; unset if it needs no token."""
    command: tuple[str, ...] = ()
    """Program and arguments, run without a shell in the recipe's folder, that start a server on 127.0.0.1. {port} is
    replaced by a free port. A program with a slash in its name is relative to the recipe."""
    start_timeout: PositiveFloat = Field(60.0, le=3600)
    """Seconds within which a server started by command has to answer for the first time."""
    revision: str = ""
    """Version or commit of the server's code, which cannot be seen from here. Changing it makes new artifacts."""
    reset: dict[str, Any] = Field({})
    """Additional arguments of the environment's reset, besides the task's seed."""
    system_prompt: str | None = None
    """System message for the policy; unset for none."""
    prompt: str = ""
    """Template of an observation's text: {FIELD} and {FIELD.KEY} are replaced, {image} and {images} are places for
    images. Empty shows the images and then the observation as JSON."""
    images: tuple[str, ...] = ()
    """Fields that hold an image: a data URL, base64 of a PNG, JPEG or WebP, or rows of pixels, gray or RGB from 0 to
    255. A field that is null is skipped."""
    own_tools: bool = False
    """Offer the server's MCP tools to the policy. Each call is a step, and its result is shown; an answer without calls
    is an action."""
    action: Literal["json"] | dict[str, Any] = "json"
    """Action in an answer: json for the last JSON object in it, or a table of the action's fields, in whose texts
    {completion} is replaced by the answer: { message = "{completion}" }."""
    extract: str = Field("all", pattern=EXTRACT)
    """Part of an answer from which the action is made, as for rewards: all, boxed, <answer>, </think>."""
    invalid_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of an answer without an action, or with one that the server rejects as invalid; it ends the episode."""
    max_turns: PositiveInt
    """Turns after which an episode ends."""

    @field_validator("prompt")
    @classmethod
    def _check_template(cls, prompt: str) -> str:
        parse_template(prompt)
        return prompt

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if (self.base_url is None) == (not self.command):
            raise PydanticCustomError("base_url_or_command", "set exactly one of base_url and command")
        if self.command and not any(PORT in word for word in self.command):
            raise PydanticCustomError(
                "port_place_missing",
                f"no argument of command contains {PORT}, the port on which the server has to listen",
            )
        if self.command and self.api_key is not None:
            raise PydanticCustomError(
                "api_key_unused", "api_key belongs to base_url: a server that command starts on this machine needs none"
            )
        if isinstance(self.action, dict) and COMPLETION not in str(self.action):
            raise PydanticCustomError("completion_place_missing", f"no field of action contains {COMPLETION}")
        if "seed" in self.reset:
            raise PydanticCustomError(
                "seed_not_settable", "reset.seed differs for each task: set environment.seed to change all of them"
            )
        if self.prompt and bool(self.images) != parse_template(self.prompt).places:
            raise PydanticCustomError(
                "image_places_mismatch", "prompt needs a place {image} or {images} exactly if images names fields"
            )
        return self
