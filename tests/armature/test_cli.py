"""What a person types and reads: exit codes, error texts, help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def armature(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "armature", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_list_is_json_for_programs(tmp_path):
    rows = json.loads(armature("list", "--json", cwd=tmp_path).stdout)
    by_name = {row["name"]: row for row in rows}
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
def test_wrong_input_is_named_without_a_traceback(arguments, code, said, tmp_path):
    done = armature(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_stage_makes_an_artifact_once_and_links_it(tmp_path):
    config = str(REPOSITORY / "configs/train-vlm/colors.toml")
    small = ["--set", "environment.train_tasks=8", "--set", "environment.heldout_tasks=8"]
    first = armature("stage", "tasks", "--config", config, "--out", "data/tasks", *small, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    digest = first.stdout.split()[-2]
    again = armature("stage", "tasks", "--config", config, "--out", "data/again", *small, cwd=tmp_path)
    assert again.stdout.split()[-2] == digest and "already made" in again.stdout + again.stderr
    made = tmp_path / "data/tasks/manifest.json"
    assert made.stat().st_nlink >= 3  # the store's and both links: nothing is stored twice
    missing = armature("stage", "evaluate", "--config", config, "--input", "tasks=data/tasks", cwd=tmp_path)
    assert missing.returncode == 2 and "['model', 'tasks'], given ['tasks']" in missing.stderr


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


@pytest.mark.slow
def test_up_serves_and_everything_ends_with_it(tmp_path):
    """Twice: by `armature down`, and by SIGKILL of the supervisor."""
    import httpx
    import psutil

    from armature.services import free_port

    for name in ("flows", "prefect.yaml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    ports = {"--prefect-server-port": str(free_port()), "--mlflow-port": str(free_port())}
    options = [part for pair in ports.items() for part in pair]
    for end in ("down", "kill"):
        up = subprocess.run(
            [sys.executable, "-m", "armature", "up", "--detach", *options], cwd=tmp_path, timeout=400, text=True,
            capture_output=True,
        )  # fmt: skip
        assert up.returncode == 0, up.stdout + up.stderr
        record = json.loads((tmp_path / ".armature/platform.json").read_text())
        family = psutil.Process(record["pid"]).children(recursive=True)
        assert httpx.get(f"{record['mlflow']}/health").status_code == 200
        names = httpx.post(f"{record['prefect']}/api/deployments/filter", json={}).json()
        assert {"colors", "sweep"} <= {each["name"] for each in names}
        second = armature("up", *options, cwd=tmp_path)
        assert second.returncode == 2 and "up already" in second.stderr
        if end == "down":
            assert armature("down", cwd=tmp_path).returncode == 0
        else:
            os.kill(record["pid"], signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
        assert armature("status", cwd=tmp_path).returncode == 1
