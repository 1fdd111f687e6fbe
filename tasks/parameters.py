"""Turn the sections of a recipe into a flow's parameters, from which Prefect makes a typed form."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, cleandoc
from typing import Any, TypeVar

from armature.components.configuration import SectionsT, sections_of
from armature.components.configuration.recipes import Sections

Result = TypeVar("Result")


def takes(
    sections: type[SectionsT],
) -> Callable[[Callable[[SectionsT], Result]], Callable[..., Result]]:
    """Decorate a function that takes a recipe so that it takes the recipe's sections as keyword arguments.

    Prefect merges the parameters of a deployment with the parameters of a run at the top level only. With one parameter
    for each section, a run can replace one section and keep the others.
    """

    def of_recipe(function: Callable[[SectionsT], Result]) -> Callable[..., Result]:
        def of_sections(**values: Any) -> Result:
            return function(sections_of(sections, values))

        arguments = [f"    {name}: {field.description}" for name, field in sections.model_fields.items()]
        of_sections.__name__, of_sections.__qualname__ = function.__name__, function.__qualname__
        of_sections.__module__ = function.__module__
        of_sections.__doc__ = "\n".join([cleandoc(sections.__doc__ or ""), "", "Args:", *arguments])
        of_sections.__signature__ = Signature(_parameters(sections))  # type: ignore[attr-defined]
        return of_sections

    return of_recipe


def _parameters(sections: type[Sections]) -> list[Parameter]:
    """Return the parameters of a flow's signature, one keyword parameter for each section."""
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.is_required() else field.default,
            annotation=field.annotation,
        )
        for name, field in sections.model_fields.items()
    ]
