"""A reward for completions that are JSON documents valid under a JSON schema."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar, Self

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import model_validator
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from armature.components.artifacts.sources import named_files, versions
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import confined, read_bytes
from armature.components.rewards.reward import CpuBoundSettings, ExtractingSettings, Reward, RewardInput, extracted


class JsonSchemaSettings(ExtractingSettings, CpuBoundSettings):
    """The reward is 1 if the completion is JSON that the schema allows, else 0."""

    json_schema: dict[str, Any] | None = None
    """The schema, of the draft that its $schema names (default: 2020-12)."""
    file: str | None = None
    """A JSON file with the schema, relative to the recipe's folder; give either this or json_schema."""

    @model_validator(mode="after")
    def _require_one_source(self) -> Self:
        if (self.json_schema is None) == (self.file is None):
            raise ValueError("give either json_schema or file")
        return self


class JsonSchema(Reward[JsonSchemaSettings]):
    """Validate the completion; the task's answer is not used.

    A fence of ``` around the JSON is allowed. The schema may refer to itself only: no other schema is downloaded.
    """

    Settings: ClassVar = JsonSchemaSettings
    runs = "process"

    def __init__(self, settings: JsonSchemaSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        schema = settings.json_schema if settings.file is None else _read(folder, settings.file)
        kind = validator_for(schema, Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ConfigurationError(
                f"not a JSON schema: {error.message}",
                code="invalid_json_schema",
                where=".".join(map(str, error.absolute_path)) or (settings.file or "json_schema"),
            ) from error
        _check_references(schema)
        self._validator: Validator = kind(schema, registry=Registry())

    @staticmethod
    def sources(settings: JsonSchemaSettings) -> dict[str, str]:
        return {**named_files({"file": settings.file}), **versions("jsonschema")}

    def grade(self, inputs: RewardInput) -> float:
        text = extracted(inputs.completion, self._settings.extract)
        if text is None:
            return 0.0
        try:
            document = json.loads(_unfenced(text), parse_float=_finite, parse_constant=_finite)
            return float(self._validator.is_valid(document))
        except (ValueError, ArithmeticError, RecursionError):
            return 0.0


def _check_references(schema: Any) -> None:
    """Check that every reference of the schema resolves within the schema.

    Raises:
        ConfigurationError: a $ref points outside of the schema or to nothing.
    """
    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    waiting = [(root, Registry().resolver_with_root(root))]
    while waiting:
        resource, resolver = waiting.pop()
        waiting += [(below, resolver.in_subresource(below)) for below in resource.subresources()]
        for keyword in ("$ref", "$dynamicRef") if isinstance(resource.contents, dict) else ():
            reference = resource.contents.get(keyword, "#")
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ConfigurationError(
                    f"the schema's reference {reference!r:.200} does not resolve within the schema",
                    code="unknown_schema_reference",
                    remedy="define it in $defs of the same schema; other schemas are not downloaded",
                ) from error


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads(read_bytes(folder / confined(name, "file")))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise ConfigurationError(
            f"the schema cannot be read: {error}", code="schema_unreadable", where=str(folder / name)
        ) from error


def _unfenced(text: str) -> str:
    """Remove the Markdown code fence (``` or ```json) from the first and last line of a text, if it has one."""
    first, _, rest = text.strip().partition("\n")
    inside, _, last = rest.rpartition("\n")
    fenced = first.rstrip().lower() in ("```", "```json") and last.strip() == "```"
    return inside if fenced else text


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a number that JSON and a float can hold")
    return value
