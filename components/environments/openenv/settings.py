"""Which server, what is shown of its observations, and how an answer becomes an action."""

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
    """An OpenEnv server that runs, or the command that starts one on this machine."""

    base_url: Annotated[str | None, BeforeValidator(refuse_plain_url)] = Field(
        None, pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$"
    )
    """Address of a server that runs, such as http://127.0.0.1:8000; or set command."""
    api_key: Annotated[EnvironmentReference | BlockReference | None, BeforeValidator(refuse_plain_key)] = None
    """Where the bearer token of that server is: { env = "NAME" }; unset: it needs none."""
    command: tuple[str, ...] = ()
    """Instead: a program and its arguments, without a shell, which starts a server on 127.0.0.1 in the recipe's folder.
    {port} is replaced by a free port. A program with a slash in its name is beside the recipe."""
    start_timeout: PositiveFloat = Field(60.0, le=3600)
    """Seconds for that server to come up."""
    revision: str = ""
    """Version or commit of the server's code, for what cannot be seen from here: another one makes new artifacts."""
    reset: dict[str, Any] = Field({})
    """More arguments of the environment's reset; each task gives it a seed besides."""
    system_prompt: str | None = None
    """What the policy is told first; unset: nothing."""
    prompt: str = ""
    """What is shown of each observation: {FIELD} and {FIELD.KEY} are replaced, {image} and {images} are places of
    images. Empty: the observation as JSON, after its images."""
    images: tuple[str, ...] = ()
    """Fields that hold an image: a data URL, base64 of a PNG, JPEG or WebP, or rows of pixels, gray or RGB from 0 to
    255. One that is null is no image."""
    action: Literal["json"] | dict[str, Any] = "json"
    """What of an answer is the action: json, the last JSON object in it; or a table of the action's fields, in whose
    texts {completion} is replaced: { message = "{completion}" }."""
    extract: str = Field("all", pattern=EXTRACT)
    """The part of an answer that the action is made of, as rewards take it: all, boxed, <answer>, </think>."""
    invalid_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of an answer that is no action, or that the server's types refuse; it ends the episode."""
    max_turns: PositiveInt
    """Turns after which an episode is ended."""

    @field_validator("prompt")
    @classmethod
    def _prompt_is_a_template(cls, prompt: str) -> str:
        parse_template(prompt)
        return prompt

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.base_url is None) == (not self.command):
            raise PydanticCustomError("base_url_or_command", "exactly one of base_url and command is needed")
        if self.command and not any(PORT in word for word in self.command):
            raise PydanticCustomError(
                "port_place_missing", f"no argument of command has {PORT}, the port on which the server has to listen"
            )
        if self.command and self.api_key is not None:
            raise PydanticCustomError(
                "api_key_unused", "api_key is for base_url: the server that command starts is on this machine"
            )
        if isinstance(self.action, dict) and COMPLETION not in str(self.action):
            raise PydanticCustomError("completion_place_missing", f"no field of action has {COMPLETION}")
        if "seed" in self.reset:
            raise PydanticCustomError(
                "seed_not_settable", "reset.seed is each task's own: environment.seed changes all of them"
            )
        if self.prompt and bool(self.images) != parse_template(self.prompt).places:
            raise PydanticCustomError(
                "image_places_mismatch", "images and the places {image} or {images} in prompt belong together"
            )
        return self
