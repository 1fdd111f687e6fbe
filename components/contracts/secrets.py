"""Secrets by reference: settings, which are recorded, name a variable; the process that needs its value reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from armature.components.contracts.errors import ConfigurationError, keep_secret
from armature.components.contracts.settings import Settings

PLAIN_SECRET = "plain_secret"
"""Type of the validation error; its input is not to be shown."""

SECRET_NAME = r"(API_?KEY|KEY|TOKEN(?![IS])|SECRET|PASSW|_PWD$)(?!.*(FILE|PATH|DIR)$)"
SECRET_VALUE = r"://[^/@\s]*:[^/@\s]+@|^(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{8,}"


class EnvironmentReference(Settings):
    """The value that a variable of the environment has where the flow runs."""

    model_config = ConfigDict(title="Environment variable")

    env: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the variable."""


class BlockReference(Settings):
    """The value of a Secret block of Prefect's, which a flow reads when it starts."""

    model_config = ConfigDict(title="Secret block")

    prefect_secret: str = Field(min_length=1)
    """Name of the block."""


BLOCKS: dict[str, str] = {}
"""Values of the blocks that the flow of this process has read; they are nowhere else."""

Variables = Mapping[str, EnvironmentReference | BlockReference | str]


def is_secret(name: str, value: object) -> bool:
    """Whether this looks like a secret in plain text, by its name or by itself."""
    if not isinstance(value, str):
        return False
    return bool(value and re.search(SECRET_NAME, name.upper().replace("-", "_"))) or bool(
        re.search(SECRET_VALUE, value)
    )


def without_passwords(text: str) -> str:
    """The text with its URLs as they may be shown."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def refuse_plain_variables(values: Any) -> Any:
    """For a table of variables, before its values are looked at: errors about those would show them."""
    remedy = (
        'name the variable that holds it, {name} = { env = "NAME" }, or leave it out: children inherit our environment'
    )
    return _refuse(values, remedy)


def refuse_plain_arguments(values: Any) -> Any:
    """For a table of a program's arguments, which `ps` shows as well."""
    return _refuse(values, "name the variable that holds it in machine.servers.environment")


def _refuse(values: Any, remedy: str) -> Any:
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if is_secret(str(name), value):
            what = "{name} looks like a secret, and settings are recorded in plain text: "
            raise PydanticCustomError(PLAIN_SECRET, what + remedy, {"name": str(name)})
    return values


def refuse_plain_key(value: Any) -> Any:
    """For a field that names where a key is."""
    if isinstance(value, str):
        raise PydanticCustomError(
            PLAIN_SECRET, 'a key is not written here, settings are recorded in plain text: { env = "NAME" } names it'
        )
    return value


def refuse_plain_url(value: Any) -> Any:
    """For a URL, or several."""
    for url in value if isinstance(value, list | tuple) else (value,):
        if is_secret("", url):
            raise PydanticCustomError(
                PLAIN_SECRET,
                "a URL holds a password, and settings are recorded in plain text: give it by the environment",
            )
    return value


_SCHEMA = {"patternProperties": {SECRET_NAME: {"type": "object"}}}
"""Prefect's server refuses a run by it, before the run's parameters are in its database."""

PlainText = Annotated[str, Field(json_schema_extra={"not": {"pattern": SECRET_VALUE}})]
Environment = Annotated[
    dict[str, EnvironmentReference | BlockReference | PlainText],
    BeforeValidator(refuse_plain_variables),
    Field(json_schema_extra=_SCHEMA),
]
"""Variables for a child process, each a value or a reference."""


def resolve(environment: Variables, where: str) -> dict[str, str]:
    """The variables with the values that references stand for, which no error shows from now on.

    Raises:
        ConfigurationError: a variable that is named is not set, or nobody has read the block.
    """
    values = {}
    for name, value in environment.items():
        if isinstance(value, BlockReference):
            if value.prefect_secret not in BLOCKS:
                raise ConfigurationError(
                    f"Prefect's block {value.prefect_secret!r} was not read: only flows read blocks",
                    code="secret_block_not_read",
                    where=f"{where}.{name}",
                    remedy="run the recipe as a flow, or name a variable of the environment",
                )
            value = BLOCKS[value.prefect_secret]
            keep_secret(value)
        elif isinstance(value, EnvironmentReference):
            if value.env not in os.environ:
                raise ConfigurationError(
                    f"the environment has no variable {value.env}",
                    code="environment_variable_missing",
                    where=f'{where}.{name} = {{ env = "{value.env}" }}',
                    remedy=f"set {value.env} where the flow runs: with `armature up`, before it is started",
                )
            value = os.environ[value.env]
            keep_secret(value)
        values[name] = value
    return values
