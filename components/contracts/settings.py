"""The base of every settings section: validated, frozen, and strict.

Defaults live in the settings classes, with what each setting means in its description. A recipe says what is its own,
and `armature show` prints all of it. A default that changes gives other fingerprints: what it affects is made again.
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
"""Types that take nothing else for theirs: true is not 1, "3" is not 3, 1 is not true. An int is a float, though."""
NO_SCHEMAS = frozenset({"default", "expected", "metadata", "serialization"})
"""Keys of a schema below which there are values."""


def _make_exact(schema: Any) -> None:
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
    """Say what is wrong with the first value that JSON has no word for, however deep in `value`; "" if all is well."""
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
    """A text anywhere in `value`, however deep, that UTF-8 cannot say, as ASCII; "" if there is none."""
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
    if isinstance(value, Mapping):
        return {key: _sorted_tables(value[key]) for key in sorted(value, key=str)}
    return [_sorted_tables(item) for item in value] if isinstance(value, list) else value


class InvalidTable(ValueError):
    """A table does not fit `model`, the settings class that a value beside it names."""

    def __init__(self, error: ValidationError, model: type[BaseModel]) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model


class Settings(BaseModel):
    """Values that change results; unknown keys are errors, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the sentence below a field is its description
        hide_input_in_errors=True,  # a traceback would show a key that was written in plain text
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
    def _tables_without_a_tag_are_of_the_default_variant(cls, values: Any) -> Any:
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
    def _tables_have_no_order(cls, values: Any) -> Any:
        """By key: fingerprints do not see the order of keys, PostgreSQL does not keep it for Prefect's parameters."""
        return _sorted_tables(values)

    @model_validator(mode="before")
    @classmethod
    def _text_is_unicode(cls, values: Any) -> Any:
        if said := _lone_surrogate(values):
            raise ValueError(f"half a character, which no file can hold: {said:.200}")
        return values

    @model_validator(mode="after")
    def _values_of_any_type_are_json(self) -> Self:
        for name in type(self).model_fields:
            if said := not_json(getattr(self, name), name):
                raise ValueError(said)
        return self
