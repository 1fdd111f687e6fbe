"""The base class of all settings sections: validated, frozen and strict.

Settings classes hold the default and the description of each setting. A recipe contains only values that differ from
defaults, and `armature show` prints all values. Changing a default changes fingerprints, so affected artifacts are made
again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema

EXACT = frozenset({"int", "float", "bool"})
"""Names of the pydantic types whose values are not converted: true is not 1, "3" is not 3, and 1 is not true. But an
int is accepted as a float."""
NO_SCHEMAS = frozenset({"default", "expected", "metadata", "serialization"})
"""Keys of a pydantic core schema whose contents are values, not further schemas."""


def _make_exact(schema: Any) -> None:
    """Set `strict` in all schemas of the types in `EXACT` within the pydantic core schema `schema`."""
    if isinstance(schema, dict):
        if schema.get("type") in EXACT:
            schema["strict"] = True
        for key, part in schema.items():
            if key not in NO_SCHEMAS:
                _make_exact(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _make_exact(part)


def not_json(value: Any, where: str) -> str:
    """Return a message about the first part of a nested `value` that has no JSON form; "" if every part has one.

    `where` is the dotted key of the value, for the message.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is not a finite number"
    if isinstance(value, date | time):
        return f"{where} is a date or a time; write it as text"
    if isinstance(value, Mapping):
        return next(filter(None, (not_json(item, f"{where}.{key}") for key, item in value.items())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (not_json(item, f"{where}[{index}]") for index, item in enumerate(value))), "")
    return ""


def _lone_surrogate(value: Any) -> str:
    """Return the first text in a nested `value` that cannot be encoded as UTF-8, with escapes in place of its
    non-ASCII characters; "" if all texts can be encoded."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            left += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            left += part
        elif isinstance(part, str) and re.search("[\ud800-\udfff]", part):
            return ascii(part)
    return ""


def _sorted_tables(value: Any) -> Any:
    """Return a nested value with the keys of all its tables sorted; the order of lists is kept."""
    if isinstance(value, Mapping):
        return {key: _sorted_tables(value[key]) for key in sorted(value, key=str)}
    return [_sorted_tables(item) for item in value] if isinstance(value, list) else value


class InvalidTable(ValueError):
    """Error: a table does not fit the settings class `model`, which another key of the same section selects."""

    def __init__(self, error: ValidationError, model: type[BaseModel]) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model


class Settings(BaseModel):
    """A section of settings. Unknown keys are errors, numbers are finite, and instances cannot be changed."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the docstring below a field is its description
        hide_input_in_errors=True,  # otherwise a traceback would show a secret that was written in plain text
        field_title_generator=lambda name, _: name.replace("_", " ").capitalize(),  # sections have one as well
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())
        schema = handler(source)
        _make_exact(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _add_the_default_tag(cls, values: Any) -> Any:
        """Complete each table that does not name its variant of a union: it gets the tag of the default variant."""
        if not isinstance(values, Mapping):
            return values
        complete = dict(values)
        for name, field in cls.model_fields.items():
            tag, default, table = field.discriminator, field.default, values.get(name)
            if isinstance(tag, str) and isinstance(default, BaseModel) and isinstance(table, Mapping):
                complete[name] = {tag: getattr(default, tag), **table}
        return complete

    @model_validator(mode="before")
    @classmethod
    def _sort_tables(cls, values: Any) -> Any:
        """Sort tables by key: fingerprints ignore the order, and PostgreSQL loses it in Prefect's parameters."""
        return _sorted_tables(values)

    @model_validator(mode="before")
    @classmethod
    def _check_text_is_unicode(cls, values: Any) -> Any:
        if text := _lone_surrogate(values):
            raise ValueError(f"the value contains an unpaired surrogate, which cannot be encoded as UTF-8: {text:.200}")
        return values

    @model_validator(mode="after")
    def _check_values_are_json(self) -> Self:
        for name in type(self).model_fields:
            if message := not_json(getattr(self, name), name):
                raise ValueError(message)
        return self
