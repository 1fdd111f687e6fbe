"""Tables in the documentation say what the code has: names, defaults, sources, messages, sizes, what is reused."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES
from armature.components.families.family import FAMILIES
from armature.components.models.settings import LoraSettings
from armature.components.rollouts.batches import advantages
from armature.components.rollouts.settings import Advantage
from armature.components.vlm import objectives
from armature.components.vlm.objectives import OBJECTIVES
from armature.components.vlm.settings import Aggregation, Objective
from benchmarks import model_memory
from tests import family_table
from tests.error_table import PAGE, all_raised, page

ROOT = Path(__file__).resolve().parents[2]


def table(page: str, heading: str, number: int = 0) -> list[list[str]]:
    """Return the rows of table number `number` below a heading of a page, as lists of cells, without the header."""
    section = re.split(r"^#+ ", (ROOT / "docs" / page).read_text(), flags=re.M)
    (text,) = (part for part in section if part.partition("\n")[0] == heading)
    result = re.findall(r"(?:^\|.*\|\n)+", text, re.M)[number]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in result.splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(rows: Sequence[Sequence[str]]) -> list[str]:
    return [row[0].strip("`") for row in rows]


def settings_classes(union: Any) -> dict[str, type[BaseModel]]:
    return {get_args(one.model_fields["name"].annotation)[0]: one for one in get_args(get_args(union)[0])}


@pytest.mark.parametrize(
    ("heading", "union", "existing", "module"),
    [
        ("Objectives", Objective, set(OBJECTIVES), objectives),
        ("Advantages", Advantage, set(advantages.ESTIMATORS), advantages),
    ],
)
def test_objectives_and_advantages(heading: str, union: Any, existing: set[str], module: Any) -> None:
    """Every one is there, with the options and defaults of its settings, and the papers that the code names."""
    rows, classes = table("algorithms.md", heading), settings_classes(union)
    assert set(names(rows)) == existing == set(classes)
    for name, (_, _, source, options) in zip(names(rows), rows, strict=True):
        fields = {key: field for key, field in classes[name].model_fields.items() if key != "name"}
        output = dict(re.findall(r"`(\w+)(?: = ([^`]+))?`", options))
        assert output.keys() == fields.keys()
        for key, value in output.items():
            if value:
                assert fields[key].default == eval(value), f"{name}.{key}"
        function = getattr(module, name)
        text = f"{function.__doc__} {ROOT.joinpath(*function.__module__.split('.')).with_suffix('.py').read_text()}"
        assert all(paper in text for paper in re.findall(r"\d{4}\.\d{5}", source)), name


def test_aggregations() -> None:
    assert set(names(table("algorithms.md", "Aggregation"))) == set(get_args(Aggregation))


def test_settings_of_published_methods_are_valid() -> None:
    for method, cells in table("algorithms.md", "Published methods as recipes"):
        overrides = []
        for key, value in re.findall(r"`([\w.]+) = ([^`]+)`", cells):
            section = "" if "." in key else "batches." if key == "advantage" else "trainer."
            overrides.append(f"{section}{key}={value}")
        if "dr_grpo" in cells:
            overrides.append("trainer.dr_grpo_length=4")
        assert overrides, method
        load_recipe("train-vlm/colors", overrides)


def test_settings_of_other_libraries_are_valid() -> None:
    rows = table("algorithms.md", "Conventions beside TRL's and verl's")
    result = [re.findall(r"`([\w.]+) = ([^`]+)`", cells[-1]) for cells in rows]
    assert sum(map(bool, result)) >= 6
    for settings in filter(None, result):
        base = ["trainer.objective={ name = 'ppo' }", "trainer.kl_coefficient=0.1"]
        if "norm" in settings[-1][0]:
            load_recipe("train-vlm/colors", [*base, "batches.advantage={name='gigpo'}", "=".join(settings.pop())])
        load_recipe("train-vlm/colors", [*base, *map("=".join, settings)])


def test_families() -> None:
    rows = table("models.md", "Families")
    assert names(rows) == list(FAMILIES)
    for family, row in zip(FAMILIES.values(), rows, strict=True):
        assert f"`{family.model_type}`" in row[1] and ("bidirectional" in row[3]) == family.image_attention


def test_tables_of_families_equal_recorded_results() -> None:
    results = json.loads(family_table.RESULTS.read_text())
    assert list(family_table.problems(results)) == [], "see tests/family_table.py"
    assert family_table.PAGE.read_text() == family_table.page(), "run python -m tests.family_table"


@pytest.mark.parametrize(
    ("family", "cell", "change", "problem"),
    [
        ("qwen3.5", None, None, "qwen3.5, load: not measured"),
        ("qwen2-vl", "video", None, "qwen2-vl, video: not measured"),
        ("llava", "video", {"nats": 1e-6, "cases": {}}, "llava, video: measured, but declared impossible"),
        ("gemma4", "untied", {"nats": 1e-6}, "gemma4, untied: measured, but declared impossible"),
        ("molmo2", "adapters", {"nats": 1e-6, "scope": "all"}, "molmo2, adapters: measured for the scope all"),
        ("llava", "adapters", {"nats": 1e-6, "scope": "all"}, "llava, adapters: measured for the scope all"),
        ("pixtral", "shared", {"nats": 1e-3}, "pixtral, shared: 0.001 nats"),
        ("pixtral", "shared", {"nats": float("nan")}, "pixtral, shared: nan nats"),
        ("bert", "load", {}, "bert: not a family"),
    ],
)
def test_results_that_contradict_families_are_found(family: str, cell: str | None, change: Any, problem: str) -> None:
    results = json.loads(family_table.RESULTS.read_text())
    if cell is None:
        del results[family]
    elif change is None:
        del results[family][cell]
    else:
        results.setdefault(family, {})[cell] = change
    assert problem in list(family_table.problems(results))


def test_gpu_cell_has_difference_and_versions() -> None:
    result = {
        "nats": 0.05,
        "kl": 1e-4,
        "dtype": "bfloat16",
        "device": "H200",
        "versions": {"torch": "2.1", "vllm": "0.3"},
    }
    results = json.loads(family_table.RESULTS.read_text())
    for entry, cell in (
        (result, "✓ 5.0e-2, KL 1.0e-4; bfloat16, H200, vllm 0.3 torch 2.1"),
        ({"reason": "too large"}, "too large"),
    ):
        assert family_table.row("qwen3.5", results["qwen3.5"] | {"gpu": entry})[7] == cell


def test_lora() -> None:
    rows = table("models.md", "LoRA")
    output = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert output == LoraSettings.model_fields.keys()
    scopes = {value.strip("`") for (_, value, _), scope in zip(rows, ("scope", ""), strict=False) if value}
    assert scopes == set(get_args(LoraSettings.model_fields["scope"].annotation))
    defaults = LoraSettings()
    (ranks,) = (row for row in rows if "rank" in row[0])
    assert ranks[1] == f"{defaults.rank}, {defaults.alpha:g}"


@pytest.mark.parametrize("name", ["Qwen2.5-VL-3B"])
def test_memory_table_equals_the_estimate(name: str) -> None:
    page = (ROOT / "docs/models.md").read_text()
    assert model_memory.row(name) in page
    assert set(names(table("models.md", "Memory"))) == model_memory.MODELS.keys()


@cache
def code() -> str:
    """Return the text of all Python files of the product, with adjacent string literals joined."""
    files = [path for folder in ("armature", "components", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")]
    return re.sub(r"\"\s*\n\s*[rf]?\"", "", "\n".join(path.read_text() for path in files))


def messages() -> list[str]:
    headings = ("Before a run starts", "Servers", "Training")
    return [message for heading in headings for message in names(table("troubleshooting.md", heading))]


@pytest.mark.parametrize("message", messages())
def test_troubleshooting_messages_exist_in_the_code(message: str) -> None:
    parts = [part.strip(" ,") for part in message.replace("'policy'", "…").split("…") if len(part.strip(" ,")) > 3]
    missing = [part for part in parts if part not in code()]
    assert parts and not missing


def test_troubleshooting_page_has_enough_entries() -> None:
    assert len(messages()) >= 20


def test_remade_stages_match_the_page() -> None:
    """A stage is made again if its settings change, or an input of it is."""
    inputs = {"tasks": (), "model": (), "train-vlm": ("tasks", "model"), "evaluate": ("tasks", "train-vlm")}
    before = load_recipe("train-vlm/colors")
    for change, *cells in table("concepts/artifacts.md", "What is made again"):
        override = re.search(r"`([\w.]+=[^`]+)`", change)
        if override is None:
            continue
        after, again = load_recipe("train-vlm/colors", [override[1]]), {}
        for stage, needs in inputs.items():
            settings = [recipe.settings_for(STAGES[stage].settings) for recipe in (before, after)]
            again[stage] = settings[0] != settings[1] or any(again[need] for need in needs)
        assert dict(zip(inputs, cells, strict=True)) == {stage: "again" if again[stage] else "" for stage in inputs}


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.error_table"


def test_error_code_belongs_to_one_class() -> None:
    classes = defaultdict(set)
    for error in all_raised():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", error.code)
        classes[error.code].add(error.kind)
    assert {code: kinds for code, kinds in classes.items() if len(kinds) > 1} == {}
