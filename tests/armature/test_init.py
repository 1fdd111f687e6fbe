"""`armature init`: the project that it writes is whole, the same every time, and its recipe can run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, fingerprint
from armature.components.machine.project import project as in_project
from armature.init import write_project
from armature.init.samples import COLORS
from tests.browser import CHROMIUM
from tests.refusals import refused


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "demo"
    write_project(folder)
    return folder


def replace_in(name: str, before: str, after: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1))

    return edit


def rows(project: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (project / "data/shapes.jsonl").read_text().splitlines()]


def test_init_writes_the_same_project_every_time(project, tmp_path):
    write_project(tmp_path / "again")
    files = [path.relative_to(project) for path in project.rglob("*") if path.is_file()]
    assert len(files) == len(rows(project)) + 11 and sum((project / each).stat().st_size for each in files) < 2**18
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (project / file).read_bytes(), file


def test_sample_answers_match_images_and_are_balanced(project):
    for row in rows(project):
        with Image.open(project / "data" / row["image"]) as image:
            assert image.size == (56, 56) and row["shape"] in row["question"]
            middle = image.convert("RGB").getpixel((28, 30))
        near = min(COLORS, key=lambda name: sum(abs(a - b) for a, b in zip(middle, COLORS[name], strict=True)))
        assert near == row["answer"], row
    assert Counter((row["split"], row["answer"]) for row in rows(project)) == Counter(
        {("train", color): 39 for color in COLORS} | {("test", color): 15 for color in COLORS}
    )


def test_tests_of_the_new_project_pass(project):
    environment = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_dvc_runs_every_stage_of_the_new_project(project):
    recipe, stages = load_recipe(project / "recipe.toml"), yaml.safe_load((project / "dvc.yaml").read_text())["stages"]
    assert recipe.name == "train-vlm/recipe" and list(stages) == ["tasks", "model", "train-vlm", "evaluate"]
    for name, stage in stages.items():
        first, *others = [stage["cmd"]] if isinstance(stage["cmd"], str) else stage["cmd"]
        copies = {"train-vlm": ["history"]}.get(name, [])
        assert [each.split()[:2] for each in others] == [["cp", f"results/{name}/{kind}.json"] for kind in copies]
        written = [*stage["outs"], *(file for each in stage.get("metrics", ()) for file in each)]
        words = first.split()
        measured = [words[number + 1] for number, word in enumerate(words) if word == "--metrics"]
        assert {each.split()[2] for each in others} | {f"results/{name}", *measured} == set(written)
        assert words[:5] == ["armature", "stage", name, "--config", "recipe.toml"]
        arguments = [words[number + 1].split("=") for number, word in enumerate(words) if word == "--input"]
        assert {key for key, _ in arguments} == set(STAGES[name].inputs)
        assert {folder for _, folder in arguments} <= set(stage.get("deps", ()))
        assert words[-2:] == ["--out", f"results/{name}"]


@pytest.fixture(scope="module")
def plots(project, tmp_path_factory) -> Path:
    """The HTML page that `dvc plots diff` writes for two training histories of a project under git."""
    folder = tmp_path_factory.mktemp("plots") / "demo"
    shutil.copytree(project, folder)

    def call(*words: str) -> None:
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = {**os.environ, **identity, "DVC_NO_ANALYTICS": "1"}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    call("git", "init", "-q")
    (folder / ".gitignore").write_text("__pycache__\n")  # the histories are not DVC's here
    for rewards in ([0.1, 0.5, "NaN"], [0.2, 0.4, 0.9]):
        (folder / "results").mkdir(exist_ok=True)
        history = [{"step": step, "reward": reward, "mismatch_kl": 0.0} for step, reward in enumerate(rewards)]
        (folder / "results/train-vlm-history.json").write_text(json.dumps(history))
        call("git", "add", "-A")
        call("git", "commit", "-qm", "a step")
    call(sys.executable, "-m", "dvc", "plots", "diff", "HEAD~1", "HEAD")
    return folder / "dvc_plots/index.html"


def test_plots_page_makes_no_requests(plots):
    text = plots.read_text()
    assert set(re.findall(r"https?://[\w./-]+", text)) <= {
        "http://www.w3.org/2000/svg",  # a name
        "https://vega.github.io/schema/vega-lite/v5.json",
    }
    assert "<script src" not in text and '"reward": 0.9' in text and '"reward": 0.5' in text


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_plots_page_draws_a_line_per_revision(plots):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: request.url.startswith("file:") or problems.append(request.url))
        tab.goto(plots.as_uri())
        lines = tab.eval_on_selector_all("polyline", "all => all.map(one => one.points.length)")
        shown = tab.inner_text("body")
        browser.close()
    assert problems == [] and sorted(lines) == [2, 3, 3, 3]  # a value that is not finite has no point
    assert shown.count("HEAD~1") == 2 and "Reward" in shown and "Mismatch KL" in shown and "Loss: no line" in shown


EDITS: dict[str, Callable[[Path], None]] = {
    "the reward": replace_in("reward.py", "== 1", "== 2"),
    "what the reward imports": replace_in("lengths.py", "2", "3"),
    "a file that the reward names": replace_in("words.txt", "red", "rot"),
    "a row": replace_in("data/shapes.jsonl", '"answer": "red"', '"answer": "rot"'),
    "an image": lambda folder: shutil.copy(folder / "data/images/200.png", folder / "data/images/201.png"),
    "nothing": lambda folder: None,
    "something else": lambda folder: (folder / "README.md").write_text("Mine."),
}


def test_edited_data_or_code_makes_new_artifacts(project, tmp_path):
    """Size and time of what is edited stay the same, and so does nothing that a fingerprint may look at instead."""
    whole = tmp_path / "whole"
    shutil.copytree(project, whole)
    (whole / "lengths.py").write_text("MOST = 2\n")
    (whole / "words.txt").write_text("red\n")
    with (whole / "reward.py").open("a") as file:
        file.write("\n\nimport lengths\nWORDS = 'words.txt'\n")
    result = {}
    for number, (what, edit) in enumerate(EDITS.items()):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        edit(folder)
        for file in folder.rglob("*"):
            os.utime(file, (1, 1))
        recipe = load_recipe(folder / "recipe.toml")
        with in_project(folder):
            result[what] = fingerprint(STAGES["tasks"], recipe.sections["environment"], {})
    assert result["something else"] == result["nothing"]
    assert len(set(result.values())) == len(EDITS) - 1


def test_init_does_not_change_a_nonempty_folder(project, tmp_path):
    before = sorted(tmp_path.iterdir())
    for folder, code in ((project, "folder_not_empty"), (project / "recipe.toml", "project_not_written")):
        with refused(code, folder):
            write_project(folder)
    assert sorted(tmp_path.iterdir()) == before
