"""Somebody has images of dice and their numbers, in a table or in folders, and trains on them without any Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.browser import NEEDS_CHROMIUM
from tests.first_hour.conftest import WINDOW, Newcomer, draw_dice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *NEEDS_CHROMIUM]

TABLE = """\
flow = "train-vlm"
extends = "train-vlm/colors"
[model.tiny.format]
answers = ["1", "2", "3", "4", "5", "6"]
transcripts = [{ user = ["{image}How many spots?"], assistant = ["{answer}"] }]
[environment]
name = "dataset"
[environment.args]
source = "dice.jsonl"
prompt = "{image}How many spots?"
images = "image"
answer = "spots"
kind = "size"
split = { by = "hash", heldout = 0.3 }
rewards = [{ name = "exact_match" }]
"""
TWO_IMAGES = """\
flow = "train-vlm"
extends = "train-vlm/colors"
[model.tiny.format]
answers = ["2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12"]
transcripts = [{ user = ["{image}{image}How many spots?"], assistant = ["{answer}"] }]
[environment]
name = "dataset"
[environment.args]
source = "dice.jsonl"
prompt = "{image}{image}How many spots?"
images = ["left", "right"]
answer = "spots"
split = { by = "hash", heldout = 0.3 }
rewards = [{ name = "exact_match" }]
"""
FOLDER = TABLE.replace('"dice.jsonl"', '"dice"').replace('"spots"', '"label"').replace('kind = "size"\n', "")
ACCURACY = re.compile(r"^accuracy +([\d.]+) \[[\d., ]+\] → ([\d.]+) \[[\d., ]+\]$", re.MULTILINE)
IMAGES = ".glance img, #list .row:nth-child(-n+8) img"
PATH = re.compile(r"^(?:model|report|history) +(/.*)$", re.MULTILINE)


def write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "dice.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def metrics(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Return the metrics of the artifacts of a stage, oldest first."""
    files = sorted((folder / ".armature/store" / stage).glob("*/metrics.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.long
def test_table_of_dice_is_learned_and_shown(newcomer: Newcomer) -> None:
    dice = draw_dice(newcomer.folder / "dice", 300)
    rows = [{"image": f"dice/{file.name}", "spots": n, "size": "few" if n < 4 else "many"} for file, n in dice]
    write_table(newcomer.folder, rows)
    newcomer.writes("dice.toml", TABLE)
    newcomer.types("check", "dice.toml", "--configuration-only")
    done = newcomer.types("run", "dice.toml", "--set", "trainer.max_steps=24")
    assert len(bars := [line for line in done.lines if "/24 [" in line]) == 1, bars
    (shown,) = ACCURACY.findall(done.text)
    before, after = metrics(newcomer.folder, "evaluate")
    assert shown == (f"{before['accuracy']:.3f}", f"{after['accuracy']:.3f}")
    assert after["accuracy"] > before["accuracy"] + 0.3
    assert after["kinds"].keys() == {"few", "many"}
    paths = PATH.findall(done.text)
    assert len(paths) == 3 and all(Path(path).exists() for path in paths)
    with newcomer.opens(Path(paths[1]).as_uri()) as page:
        newcomer.saves(page, "report")
        assert page.problems == []

    view = newcomer.starts("view")
    with newcomer.opens(view.wait_for(r"http://127\S+")[0]) as page:
        page.locator("#figure-accuracy").wait_for()
        newcomer.saves(page, "opened")
        assert page.locator("#run option:checked").inner_text().startswith("train-vlm/dice · ")
        assert page.inner_text("#figure-accuracy").split(" → ") == [str(float(value)) for value in shown]
        page.click("[data-tab=rollouts]")
        page.locator(".glance img").wait_for()
        while not page.evaluate(f"[...document.querySelectorAll({IMAGES!r})].every((one) => one.naturalWidth)"):
            page.wait_for_timeout(50)
        newcomer.saves(page, "rollouts")
        prompt, answer, right = page.locator(".glance dd").all_inner_texts()
        row = json.loads(page.locator("#detail pre", has_text='"row"').inner_text())["row"]
        assert (prompt, right) == ("How many spots?", str(rows[row]["spots"]))
        assert page.inner_text("#detail .heading .pill") == str(int(answer == right))
        assert page.evaluate("document.querySelector('.glance img').naturalWidth") == 56
        box = page.locator(".glance").bounding_box()
        assert box["y"] + box["height"] < WINDOW[1]
        assert page.locator("#list .thumb").count() > 10
        for tab in ("tasks", "compare", "failures"):
            page.click(f"[data-tab={tab}]")
            page.wait_for_timeout(300)
            newcomer.saves(page, tab)
        assert page.problems == []
    view.interrupt()
    assert view.end() == 130
    assert newcomer.lines <= 15


@pytest.mark.long
def test_two_images_a_row_without_kind_are_trained_on(newcomer: Newcomer) -> None:
    dice = draw_dice(newcomer.folder / "dice", 60)
    pairs = zip(dice, dice[7:] + dice[:7], strict=True)
    names = [(f"dice/{left.name}", f"dice/{right.name}", m + n) for (left, m), (right, n) in pairs]
    write_table(newcomer.folder, [dict(zip(("left", "right", "spots"), row, strict=True)) for row in names])
    newcomer.writes("dice.toml", TWO_IMAGES)
    short = ("--set", "trainer.max_steps=1", "--set", "rollouts.groups_per_step=8")
    shown = ACCURACY.search(newcomer.types("run", "dice.toml", *short).text)
    before, after = metrics(newcomer.folder, "evaluate")
    assert shown is not None and shown.groups() == (f"{before['accuracy']:.3f}", f"{after['accuracy']:.3f}")
    (training,) = (newcomer.folder / ".armature/store/train-vlm").glob("*/history.json")
    (step,) = json.loads(training.read_text())
    assert step["images"] == 2 * step["sequences"] > 0
    assert newcomer.lines <= 14


def test_folder_of_images_is_ready_to_train(newcomer: Newcomer) -> None:
    for file, number in draw_dice(newcomer.folder / "dice", 60):
        (file.parent / str(number)).mkdir(exist_ok=True)
        file.rename(file.parent / str(number) / file.name)
    newcomer.writes("dice.toml", FOLDER)
    kl = re.search(r"^mismatch KL +(\S+)$", newcomer.types("check", "dice.toml").text, re.MULTILINE)
    assert kl is not None and abs(float(kl[1])) < 1e-6
    (tasks,) = (newcomer.folder / ".armature/store/tasks").glob("*/train.parquet")
    assert 30 < pq.read_metadata(tasks).num_rows < 60
    assert newcomer.lines <= 14
