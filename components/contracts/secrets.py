"""Secrets by reference.

Settings are recorded, so they contain only the names of variables. The process that needs a secret reads its value.
"""

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
"""Type of the validation error for a secret in plain text. Messages must not show the input of such an error."""

SECRET_NAME = r"(API_?KEY|KEY|TOKEN(?![IS])|SECRET|PASSW|_PWD$)(?!.*(FILE|PATH|DIR)$)"
SECRET_VALUE = r"://[^/@\s]*:[^/@\s]+@|^(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{8,}"


class EnvironmentReference(Settings):
    """A reference to an environment variable of the machine where the flow runs."""

    model_config = ConfigDict(title="Environment variable")

    env: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the variable."""


class BlockReference(Settings):
    """A reference to a Secret block of Prefect, which a flow reads when it starts."""

    model_config = ConfigDict(title="Secret block")

    prefect_secret: str = Field(min_length=1)
    """Name of the block."""


BLOCKS: dict[str, str] = {}
"""Values of the Secret blocks of Prefect that the flow of this process has read. They are kept only in memory."""

Variables = Mapping[str, EnvironmentReference | BlockReference | str]


def is_secret(name: str, value: object) -> bool:
    """Check whether `value` is probably a secret in plain text, judged by its name and by the form of the value."""
    if not isinstance(value, str):
        return False
    return bool(value and re.search(SECRET_NAME, name.upper().replace("-", "_"))) or bool(
        re.search(SECRET_VALUE, value)
    )


def without_passwords(text: str) -> str:
    """Return the text with user names and passwords removed from its URLs.

    >>> without_passwords("http://me:secret@host:80/x")
    'http://host:80/x'
    """
    return re.sub(r"://[^/@\s]*@", "://", text)


def refuse_plain_variables(values: Any) -> Any:
    """Refuse secrets in plain text in a table of environment variables.

    This validator runs before the others, because their errors would show the values.
    """
    remedy = (
        'name the variable that holds it, {name} = { env = "NAME" }, or leave it out: children inherit our environment'
    )
    return _refuse(values, remedy)


def refuse_plain_arguments(values: Any) -> Any:
    """Refuse secrets in plain text in a table of a program's arguments, which other users of the machine can list."""
    return _refuse(values, "name the variable that holds it in machine.servers.environment")


def _refuse(values: Any, remedy: str) -> Any:
    """Return the table `values` unchanged, or raise a validation error with this remedy if a value looks like a
    secret."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if is_secret(str(name), value):
            what = "{name} looks like a secret, and settings are recorded in plain text: "
            raise PydanticCustomError(PLAIN_SECRET, what + remedy, {"name": str(name)})
    return values


def refuse_plain_key(value: Any) -> Any:
    """Refuse a string in a field for a key: the field has to contain a reference to the key."""
    if isinstance(value, str):
        raise PydanticCustomError(
            PLAIN_SECRET, 'a key is not written here, settings are recorded in plain text: { env = "NAME" } names it'
        )
    return value


def refuse_plain_url(value: Any) -> Any:
    """Refuse passwords in a URL or a list of URLs."""
    for url in value if isinstance(value, list | tuple) else (value,):
        if is_secret("", url):
            raise PydanticCustomError(
                PLAIN_SECRET,
                "a URL holds a password, and settings are recorded in plain text: give it by the environment",
            )
    return value


_SCHEMA = {"patternProperties": {SECRET_NAME: {"type": "object"}}}
"""JSON schema of a table of variables that allows no secret in plain text. Prefect's server checks it before it writes
a run's parameters to its database."""

PlainText = Annotated[str, Field(json_schema_extra={"not": {"pattern": SECRET_VALUE}})]
Environment = Annotated[
    dict[str, EnvironmentReference | BlockReference | PlainText],
    BeforeValidator(refuse_plain_variables),
    Field(json_schema_extra=_SCHEMA),
]
"""Environment variables of a child process; each is a value or a reference to a secret."""


def resolve(environment: Variables, where: str) -> dict[str, str]:
    """Return the variables with each reference replaced by the value of its secret.

    Later errors show *** in place of these values. `where` is the dotted key of the table, for errors.

    Raises:
        ConfigurationError: a named variable is not set, or a block was not read.
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
