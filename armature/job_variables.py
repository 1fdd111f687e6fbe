"""`armature submit --job-variable`: what a run asks for of the variables in a work pool's template of Jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from armature.components.configuration import merge, parse_override
from armature.components.configuration.tables import Written
from armature.components.contracts.errors import ConfigurationError
from armature.components.registry import suggestion


def parse_job_variables(texts: Sequence[str], template: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """`key=value` or `key.entry=value` of each text, values as of `--set`.

    Args:
        template: of the work pool called `pool`.

    Raises:
        ConfigurationError: a text of another form, or a variable or value that the template does not have.
    """
    known = template.get("variables", {}).get("properties", {})
    given: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key.strip() or not value.strip():
            raise ConfigurationError(
                f"not a variable and its value: {text!r}",
                code="invalid_job_variable",
                remedy="write --job-variable key=value",
            )
        given = merge(given, parse_override(text))
    for key, value in given.items():
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is not a variable of the template of Jobs",
                code="unknown_job_variable",
                where=f"--job-variable, work pool {pool!r}",
                remedy=suggestion(key, known) if known else "leave it out: this pool's runs have none",
            )
        if known[key].get("type") == "string" and isinstance(value, Written):
            given[key] = value.text
    if error := best_match(Draft202012Validator(template["variables"]).iter_errors(given)) if given else None:
        raise ConfigurationError(
            error.message,
            code="invalid_job_variable",
            where=f"--job-variable {'.'.join(map(str, error.absolute_path))}, work pool {pool!r}",
            remedy=known[error.absolute_path[0]].get("description", "") if error.absolute_path else "",
        )
    return given
