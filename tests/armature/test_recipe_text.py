"""`armature show <recipe>`: all values as TOML, and where those are from that are not defaults."""

from __future__ import annotations

import re
import tomllib

import pytest

from armature.components.configuration import CONFIGS, build_recipe, load_recipe, recipe_names
from armature.show import recipe_text
from tests.configuration.test_recipes import bases, leaves


def marked(text: str, remark: str) -> set[str]:
    """Return the keys, as "table.key", of the lines of a TOML text that end with the comment `remark`."""
    result, table = set(), ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(.+)\]", line):
            table = header[1]
        elif line.endswith(f"  # {remark}"):
            result.add(f"{table}.{line.split(' = ')[0]}")
    return result


@pytest.mark.parametrize("options", [{}, {"describe": True}, {"changed_only": True}], ids=str)
@pytest.mark.parametrize("name", recipe_names())
def test_shown_toml_is_the_same_recipe(name, options):
    text = recipe_text(name, **options)
    assert build_recipe(name, tomllib.loads(text), where="shown") == load_recipe(name)


def test_show_marks_exactly_the_values_of_the_recipe():
    output = set()
    for file in ("train-vlm/colors.toml", *map(str, bases(CONFIGS / "train-vlm/colors.toml"))):
        values = tomllib.loads((CONFIGS / file).read_text())
        values = {section: table for section, table in values.items() if isinstance(table, dict)}
        output |= {".".join(str(part) for part in key if part not in range(9)) for key in leaves(values)}
    lists = {"model.tiny.format.transcripts"}
    output = {key for key in output if not key.startswith(tuple(lists))} | lists
    text = recipe_text("train-vlm/colors")
    assert marked(text, "recipe") == output
    assert "# revision: none" in text.splitlines() and "group_size = 8" in text.splitlines()


def test_show_toml_leaves_out_defaults():
    overrides = ["trainer.max_steps=50"]
    whole, ours = (recipe_text("train-vlm/colors", overrides, changed_only=only) for only in (False, True))
    saved = re.findall(r"^(\w+ = .*?)  # (?:recipe|--set)$", whole, re.MULTILINE)
    head = ("flow = ", "description = ")
    assert [line for line in ours.splitlines() if " = " in line and not line.startswith(head)] == saved
    assert "max_steps = 50" in saved and not any(line.startswith("group_size") for line in saved)


def test_show_marks_values_of_the_command_line():
    overrides = ["trainer.max_steps=50", "trainer.objective={name='ppo', clip_high=0.3}"]
    text = recipe_text("train-vlm/molmo2-tiny", overrides)
    assert marked(text, "--set") == {"trainer.max_steps", "trainer.objective.name", "trainer.objective.clip_high"}
    assert "max_steps = 50  # --set" in text.splitlines() and "max_steps = 80" not in text
    assert "noise = 1.0  # --set" in recipe_text("train-vlm/colors", ["environment.args.noise=1.0"]).splitlines()


def test_show_describe_puts_descriptions_above_values():
    lines = recipe_text("train-vlm/colors", describe=True).splitlines()
    assert (
        lines[lines.index("warmup_steps = 0") - 1]
        == "# Number of steps over which learning rates rise linearly from 0."
    )
