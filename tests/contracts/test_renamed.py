"""A recipe with a setting's former name is refused, and told the new one."""

from __future__ import annotations

import pytest

from components.configuration import load_recipe
from components.contracts.errors import ConfigurationError


@pytest.mark.parametrize(
    ("recipe", "section", "old", "new", "value"),
    [
        ("train-vlm/colors", "environment.args", "colours", "colors", "{red = [255, 0, 0], blue = [0, 0, 255]}"),
        ("train-vlm/recall", "environment.args", "colours", "colors", "{red = [255, 0, 0], blue = [0, 0, 255]}"),
        ("train-vlm/recall", "environment.args", "pictures", "images", "1"),
        ("train-vlm/molmo2-tiny", "environment.args", "max_dead_ends", "max_invalid_actions", "1"),
        ("train-vlm/molmo2-tiny", "environment.args.prompt", "dead_ends", "invalid_actions", "shown"),
        ("train-vlm/molmo2-text", "environment.args", "picture", "image", '{form = "none"}'),
        ("train-vla/tiny", "statistics", "pictures", "images", "all"),
    ],
)
def test_a_former_name_is_refused_with_the_new_one_which_works(
    recipe: str, section: str, old: str, new: str, value: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"\b{old} is not a setting any more: write {new}\b"):
        load_recipe(recipe, [f"{section}.{old}={value}"])
    load_recipe(recipe, [f"{section}.{new}={value}"])
