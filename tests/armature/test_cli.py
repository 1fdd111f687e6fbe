"""What a person types and reads: exit codes, error texts, help."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from armature.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int | str | None
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def armature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in a folder of its own: its main is what `armature` calls."""

    def run(*arguments: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["armature", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(ended.value.code, printed.out, printed.err)

    return run


def test_list_is_json_for_programs(tmp_path):
    command = [sys.executable, "-m", "armature", "list", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    by_name = {row["name"]: row for row in json.loads(done.stdout)}
    assert by_name["train-vlm/colors"]["pool"] == "cpu"
    assert by_name["train-vlm/qwen3-vl"]["pool"] == "train-gpu"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "train-vlm/colrs"], 2, "did you mean 'train-vlm/colors'"),
        (["run", "train-vlm/colors", "--set", "trainer.max_stepz=3"], 2, "did you mean 'max_steps'"),
        (["run", "train-vlm/colors", "--set", "rollouts.sampling.top_p=0.5"], 2, "top_p"),
        (["run", "train-vlm/colors", "--machine", "servers=0"], 2, "machine.servers"),
        (["stage", "taks", "--config", str(REPOSITORY / "configs/train-vlm/colors.toml")], 2, "did you mean 'tasks'"),
        (["check", "train-vlm/qwen3-vl", "--machine", f"server_python={sys.executable}"], 2, "GPU 0 is named"),
        (["train-multimodal"], 2, "Usage: armature train-multimodal @ path/to/file.toml"),
        (["train-multimodal", "@", "missing.toml"], 2, "TOML config not found: "),
    ],
)
def test_wrong_input_is_named_without_a_traceback(arguments, code, said, armature):
    done = armature(*arguments)
    assert done.code == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "name", ["evaluate/libero", "train-vla/tiny", "quantile-stats/folder", "alfworld-games/generated"]
)
def test_recipes_without_model_servers_are_checked_without_an_interpreter_that_has_vllm(name, armature):
    done = armature(
        "check", name, "--configuration-only", "--machine", "server_python=nowhere", "--machine", "trainer_gpus=[]"
    )
    assert done.code == 0 and "what the recipe names is there" in done.stdout


def test_stage_makes_an_artifact_once_and_links_it(tmp_path, armature):
    config = str(REPOSITORY / "configs/train-vlm/colors.toml")
    small = ["--set", "environment.train_tasks=8", "--set", "environment.heldout_tasks=8"]
    first = armature("stage", "tasks", "--config", config, "--out", "data/tasks", *small)
    assert first.code == 0, first.stderr
    digest = first.stdout.split()[-2]
    again = armature("stage", "tasks", "--config", config, "--out", "data/again", *small)
    assert again.stdout.split()[-2] == digest and "already made" in again.stdout + again.stderr
    made = tmp_path / "data/tasks/manifest.json"
    assert made.stat().st_nlink >= 3  # the store's and both links: nothing is stored twice
    missing = armature("stage", "evaluate", "--config", config, "--input", "tasks=data/tasks")
    assert missing.code == 2 and "['model', 'tasks'], given ['tasks']" in missing.stderr


def test_seed_layout_is_read_with_its_own_words(tmp_path):
    from armature.train_multimodal import InferenceArgs, parse
    from components.contracts.errors import ConfigurationError

    file = tmp_path / "vlm.toml"
    file.write_text(
        'model = "some/model"\n[env]\nid = "colors"\n[inference]\ngpus = 1\n'
        '[inference.args]\nenforce_eager = true\nmax_model_len = 8192\nlimit_mm_per_prompt = "image=4"\n'
        "[trainer]\ngpus = 1\n[trainer.args]\nmax_steps = 3\n"
    )
    layout = parse(["@", str(file)])
    assert layout.inference.args.images == 4 and layout.inference.args.model_extra == {"enforce_eager": True}
    assert InferenceArgs(limit_mm_per_prompt='{"image": 2}').images == 2
    file.write_text(file.read_text().replace("[trainer]", "[triner]"))
    with pytest.raises(ConfigurationError, match="trainer"):
        parse(["@", str(file)])
