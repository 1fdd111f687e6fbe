"""Recipes for public datasets and for the table in docs/your-own-data.md: every row is a task with correct grading."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from armature.components.configuration import CONFIGS, load_recipe
from armature.components.contracts.episodes import Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.settings import TrainEvaluationSettings
from armature.components.machine.project import project
from benchmarks.charts import COLORS, write_charts

from .tables import bars

ROWS = 8


@dataclass(frozen=True)
class PublicDataset:
    """A dataset of the hub, with made-up rows of its format.

    `row(n)` is a row, `right(row)` and `wrong(row)` are completions to grade, and `shown(row)` is a part of the prompt.
    """

    splits: tuple[str, ...]
    row: Callable[[int], Mapping[str, Any]]
    right: Callable[[Mapping[str, Any]], tuple[str, ...]]
    wrong: Callable[[Mapping[str, Any]], tuple[str, ...]]
    shown: Callable[[Mapping[str, Any]], str]
    features: Callable[[Any], dict[str, Any]]
    kinds: set[str] = field(default_factory=lambda: {""})


def _image(number: int) -> dict[str, Any]:
    return {"bytes": bars(number), "path": None}


def _thought(answer: object) -> str:
    return f"<think>I look.</think>\n<answer>{answer}</answer>"


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f'```json\n[{{"bbox_2d": [{left}, {top}, {right}, {bottom}], "label": "it"}}]\n```'


def _corners(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    left, top, width, height = row["bbox"]
    return left, top, left + width, top + height


def _choice(number: int) -> str:
    return ("Yes", "14", "0.57", "Germany")[number % 4]


DATASETS = {
    "geometry3k": PublicDataset(
        splits=("train", "validation", "test"),
        row=lambda n: {
            "images": [_image(n)],
            "problem": f"<image>Find $x$ in triangle {n}.",
            "answer": ("3", "2 \\sqrt { 221 }", "6.5", "\\frac { 120 } { 13 }")[n % 4],
            "id": n,
            "choices": ["3.0", "6.5"],
            "ground_truth": "A",
        },
        right=lambda row: (f"<think>By Pythagoras.</think> So \\boxed{{{row['answer']}}}.",),
        wrong=lambda row: ("<think>By Pythagoras.</think> So \\boxed{77}.", row["answer"], ""),
        shown=lambda row: row["problem"].removeprefix("<image>"),
        features=lambda d: {
            "images": d.Sequence(d.Image()),
            **dict.fromkeys(("problem", "answer", "ground_truth"), d.Value("string")),
            "id": d.Value("int64"),
            "choices": d.Sequence(d.Value("string")),
        },
    ),
    "clevr-counting": PublicDataset(
        splits=("train",),
        row=lambda n: {
            "image": _image(n),
            "problem": "How many items are there in the image?",
            "solution": f"<answer> {n} </answer>",
        },
        right=lambda row: (_thought(row["solution"].split()[1]),),
        wrong=lambda row: (_thought(77), _thought(f"{row['solution'].split()[1]} or 77"), row["solution"][8:], ""),
        shown=lambda row: row["problem"],
        features=lambda d: {"image": d.Image(), "problem": d.Value("string"), "solution": d.Value("string")},
    ),
    "refcoco": PublicDataset(
        splits=("val", "test", "testA", "testB"),
        row=lambda n: {
            "question_id": str(n),
            "image": _image(n),
            "question": "Come up with a caption for the area.",
            "answer": [f"the bar number {n}", "highest"],
            "segmentation": [1.0, 2.0, 3.0, 4.0],
            "bbox": [4.0, 8.0 + n, 20.5, 16.0],
            "iscrowd": 0,
            "file_name": f"COCO_train2014_{n}.jpg",
        },
        right=lambda row: (_box(*_corners(row)), str(list(_corners(row)))),
        wrong=lambda row: (_box(*row["bbox"]), _box(0, 0, 1, 1), "the bar", ""),
        shown=lambda row: f"Where is this: {row['answer'][0]}?",
        features=lambda d: {
            "image": d.Image(),
            **dict.fromkeys(("question_id", "question", "file_name"), d.Value("string")),
            "answer": d.Sequence(d.Value("string")),
            **dict.fromkeys(("segmentation", "bbox"), d.Sequence(d.Value("float32"))),
            "iscrowd": d.Value("int8"),
        },
    ),
    "chartqa": PublicDataset(
        splits=("train", "val", "test"),
        row=lambda n: {
            "image": _image(n),
            "query": f"What is the value of bar {n}?",
            "label": [_choice(n)],
            "human_or_machine": n % 2,
        },
        right=lambda row: (
            _thought(row["label"][0]),
            *([_thought(float(row["label"][0]) * 1.04)] if row["label"][0][0].isdigit() else []),
        ),
        wrong=lambda row: (_thought("France"), _thought(77), row["label"][0], ""),
        shown=lambda row: row["query"],
        features=lambda d: {
            "image": d.Image(),
            "query": d.Value("string"),
            "label": d.Sequence(d.Value("string")),
            "human_or_machine": d.ClassLabel(names=["human", "machine"]),
        },
        kinds={"human", "machine"},
    ),
}


def test_every_hub_dataset_recipe_has_a_case() -> None:
    of_hubs = [
        path.stem.removesuffix("-7b")
        for path in (CONFIGS / "train-vlm").glob("*.toml")
        if "Qwen2.5" in path.read_text()
    ]
    assert set(of_hubs) == set(DATASETS)


@pytest.mark.parametrize("size", ["", "-7b"])
@pytest.mark.parametrize("name", DATASETS)
def test_recipe_makes_a_task_of_every_row_and_grades_answers(name: str, size: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = DATASETS[name]
    features = datasets.Features(dataset.features(datasets))
    table = {
        split: datasets.Dataset.from_list([dict(dataset.row(ROWS * k + n)) for n in range(ROWS)], features=features)
        for k, split in enumerate(dataset.splits)
    }
    datasets.DatasetDict(table).save_to_disk(str(tmp_path / "saved"))
    where = [f"environment.args.source={tmp_path / 'saved'}", "environment.args.revision="]
    if name in ("clevr-counting", "refcoco"):
        where.append("environment.args.split.heldout=0.5")
    recipe = load_recipe(f"train-vlm/{name}{size}", where)
    settings, evaluation = recipe.sections["environment"], recipe.sections["evaluation"]
    assert isinstance(settings, EnvironmentSettings) and isinstance(evaluation, TrainEvaluationSettings)
    with closing(make_environment(settings)) as environment:
        tasks = [task for split in ("train", "heldout") for task in environment.tasks(split)]  # type: ignore[arg-type]
        used = dataset.splits if name == "refcoco" else tuple(split for split in dataset.splits if split[:3] != "val")
        assert len(tasks) == ROWS * len(used) and {task.payload["file"] for task in tasks} == set(used)
        assert {task.payload.get("kind", "") for task in tasks} == dataset.kinds
        if size:
            return  # the same environment, another model
        rows = {(split, n): dataset.row(ROWS * k + n) for k, split in enumerate(dataset.splits) for n in range(ROWS)}
        for task in tasks[:: max(1, len(tasks) // ROWS)]:
            row = rows[task.payload["file"], task.payload["row"]]
            observed = asyncio.run(environment.episode(task).reset())
            text = "".join(part for part in observed.content if isinstance(part, str))
            assert dataset.shown(row) in text and "{" not in text.replace('{"bbox_2d', "").replace("{}", "")
            assert [part.data for part in observed.content if isinstance(part, EncodedImage)] == [
                image["bytes"] for image in row.get("images", [row.get("image")])
            ]
            for completion in dataset.right(row):
                assert _reward(environment, task, completion) == pytest.approx(1.0), completion
            for completion in dataset.wrong(row):
                assert _reward(environment, task, completion) < evaluation.success_reward, completion


def _reward(environment: Any, task: Task, completion: str) -> float:
    parts = asyncio.run(environment.episode(task).step(completion)).reward_parts
    return sum(environment.reward_weights[part] * value for part, value in parts.items())


PAGE = Path(__file__).resolve().parents[3] / "docs/your-own-data.md"


def test_recipe_in_docs_gives_correct_tasks(tmp_path: Path) -> None:
    text, *_ = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 30
    write_charts(tmp_path / "charts", count=24)
    (tmp_path / "charts/charts.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "charts/charts.toml"))
    settings: Any = recipe.sections["environment"]
    assert isinstance(settings, EnvironmentSettings)
    with project(tmp_path / "charts"):
        environment: Any = make_environment(settings)
        tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
        answers = {task.payload["row"]: environment.demonstration(task)[0] for task in tasks}
    assert len(tasks) == 24 and {task.payload["kind"] for task in tasks} <= {"first", "second", "third", "fourth"}
    for row, answer in answers.items():
        with Image.open(tmp_path / f"charts/images/{row:04d}.png") as image:
            pixels = np.asarray(image.convert("RGB"), dtype=int)
        tops = {}
        for name, code in COLORS.items():
            color = [int(code[start : start + 2], 16) for start in (1, 3, 5)]
            tops[name] = int(np.argwhere(np.abs(pixels - color).sum(-1) < 30)[:, 0].min())
        assert min(tops, key=lambda name: tops[name]) == answer
