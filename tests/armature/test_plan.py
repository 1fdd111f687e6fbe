"""`armature plan`: its table, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.plan import plan_recipe

COSTS = """
sync_seconds = 7.0

[servers]
pass_seconds = 0.5

[failures]
hours_between = 50_000.0

[workload]
turns = 3.0
max_turns = 5
environment_seconds = 2.0
"""


def planned(*changes: str, gpus: tuple[int, ...] = (2,), name: str = "train-vlm/colors", **options: object) -> str:
    given: dict[str, object] = {"gpu": "h100", "records": (), "given": None, "price": None}
    recipe = load_recipe(name, ("rollouts.groups_per_step=4", *changes) if "vlm" in name else changes)
    return "\n".join(plan_recipe(recipe, gpus, **{**given, **options}))  # type: ignore[arg-type]


def test_a_row_for_each_number_of_gpus_and_the_source_of_every_cost() -> None:
    said = planned(gpus=(1, 2, 4), price=2.5)
    rows = [line.split() for line in said.splitlines() if line.split()[:1] in (["1"], ["2"], ["4"])]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert "a server takes 1 GPUs" in said  # one GPU alone is said, and the others are planned
    assert rows[1][1:3] == ["1", "1"]
    for line in said.partition("what this rests on")[2].splitlines()[1:-2]:
        assert any(word in line for word in ("measured", "assumed", "computed")), line


def test_what_a_file_says_is_taken_and_named(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    file.write_text(COSTS)
    said = planned(given=file)
    assert "turns = 3, max_turns = 5" in said
    assert f"given: {file}" in next(line for line in said.splitlines() if line.startswith("  sync_seconds"))
    step = next(line for line in said.splitlines() if line.lstrip().startswith("2 ")).split()[3]
    assert float(step) > 7 + 2 * 2.0


@pytest.mark.parametrize(
    ("changes", "options", "error", "said"),
    [
        ((), {"gpu": "h1000"}, ConfigurationError, "no GPU is called 'h1000'"),
        ((), {"gpus": (1,)}, ConfigurationError, "and the trainer 1"),
        ((), {"name": "train-vla/tiny"}, ConfigurationError, "train-vla has no rollouts"),
        (("model.source=./nowhere", "model.tiny="), {}, DataError, "the model's configuration cannot be read"),
        (("trainer.max_tokens_per_micro_batch=2000000000",), {}, ConfigurationError, "however many there are"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    changes: tuple[str, ...], options: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        planned(*changes, **options)  # type: ignore[arg-type]


def test_an_unknown_cost_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    file.write_text("[servers]\npass_second = 1.0\n")
    with pytest.raises(ConfigurationError, match="pass_second"):
        planned(given=file)
