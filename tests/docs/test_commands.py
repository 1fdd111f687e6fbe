"""Every command and every reference in the documentation is one that exists."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/errors.md"}),  # made from messages, with values in them
]
PROGRAMS = ("armature", "make", "dvc", "prefect")


def commands() -> list[tuple[str, str]]:
    """Return all commands in the documentation as pairs (page, command): lines of shell blocks and inline code, without
    comments."""
    result = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.split("  #")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines += re.findall(r"`([^`\n]+)`", prose)
        result += [(page.name, line) for line in lines if line.split(" ")[0] in PROGRAMS and " " in line]
    return sorted(set(result))


def of(program: str) -> list[tuple[str, str]]:
    return [(page, line) for page, line in commands() if line.split()[0] == program]


def test_documentation_contains_commands():
    assert len(commands()) >= 20 and {line.split()[0] for _, line in commands()} == set(PROGRAMS)


@pytest.mark.parametrize(("page", "line"), of("armature"))
def test_armature_commands_parse(page, line, monkeypatch):
    import typer.main

    from armature.cli import app

    monkeypatch.chdir(ROOT)
    command, words = typer.main.get_command(app), shlex.split(line.partition(" > ")[0])[1:]
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{page}: {line}"
        command = command.commands[words.pop(0)]
    if words:  # a bare `armature stage` names the command without its arguments
        command.make_context("armature", words)


def recipes_in(line: str) -> list[str]:
    return re.findall(r"\b(?:alfworld-games|demonstrations|train-vlm|train-vla|evaluate|quantile-stats)/[\w.-]+", line)


@pytest.mark.parametrize(("page", "line"), [(p, c) for p, c in commands() if recipes_in(c)])
def test_recipes_and_overrides_exist(page, line):
    from armature.components.configuration import load_recipe, recipe_names

    words = shlex.split(line)
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    sets += [f"machine.{words[i + 1]}" for i, word in enumerate(words) if word == "--machine"]
    for name in recipes_in(line):
        name = name.removesuffix(".toml")
        assert name in recipe_names(), f"{page}: {line}"
        load_recipe(name, sets)


@pytest.mark.parametrize(("page", "line"), of("make"))
def test_make_targets_exist(page, line):
    words = shlex.split(line)
    result = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("page", "line"), of("dvc"))
def test_dvc_commands_parse(page, line):
    from dvc.cli.parser import get_main_parser

    get_main_parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("words", sorted({tuple(line.split()[1:3]) for _, line in of("prefect")}))
def test_prefect_commands_exist(words):
    command = [Path(sys.executable).parent / "prefect", *words, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and words[-1] in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / unquote(target)).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    folders = "armature|benchmarks|components|configs|docs|examples|flows|infra|tasks|tests"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists() or path.endswith(".env"), f"{page.name}: {path}"


def test_tree_in_contributing_lists_all_folders():
    block = (ROOT / "CONTRIBUTING.md").read_text().partition("## The tree")[2].split("```")[1]
    top, inner = re.findall(r"^(\w+)/", block, re.MULTILINE), re.findall(r"^  (\w+)/", block, re.MULTILINE)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert sorted(top) == sorted(folders)
    assert sorted(inner) == sorted(path.parent.name for path in (ROOT / "components").glob("*/__init__.py"))


def named_tests() -> list[tuple[str, str]]:
    pages = [*(ROOT / "docs/operations").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    return sorted({match for page in pages for match in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())})


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_tests_named_in_operations_exist(file, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def walkthrough() -> list[tuple[str, str]]:
    """Return the steps of the walk through the code in CONTRIBUTING.md, as pairs (file, function or class)."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Follow one sample")[2].partition("\n## ")[0]
    return sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", section)))


def test_walkthrough_passes_from_environment_to_server():
    folders = {file.split("/")[1] for file, _ in walkthrough() if file.startswith("components/")}
    assert {"environments", "rollouts", "inference", "vlm", "training", "rl"} <= folders


@pytest.mark.parametrize(("file", "name"), walkthrough())
def test_functions_of_the_walkthrough_exist(file, name):
    names = [getattr(node, "name", None) for node in ast.parse((ROOT / file).read_text()).body]
    assert name in names, f"{file} has no {name}"


def test_benchmarks_page_is_current():
    import json

    from benchmarks.table import PAGE, RESULTS, render

    assert PAGE.read_text() == render(json.loads(RESULTS.read_text()))


def test_train_multimodal_example_file_is_valid(tmp_path):
    from armature.components.environments.settings import EnvironmentSettings
    from armature.components.rl.config import MultimodalRLConfig
    from armature.train_multimodal import parse

    (block,) = re.findall(r"^```toml\n(model = .*?)^```", (ROOT / "docs/trainer.md").read_text(), re.M | re.S)
    (tmp_path / "own.toml").write_text(block)
    layout = parse(["@", str(tmp_path / "own.toml")])
    config = MultimodalRLConfig(env_id=layout.env.id, env_args=layout.env.args, **layout.trainer.args)
    EnvironmentSettings(name=config.env_id, args=config.env_args, train_tasks=8, heldout_tasks=8)
    assert config.heldout_set() is not None
