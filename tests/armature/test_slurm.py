"""The script of `armature submit --slurm`; tests/production/test_slurm.py submits it to SLURM itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from armature import slurm
from armature.cli import main
from tests.refusals import refused

TWO = ["machine.trainer_nodes=2", "machine.trainer_interface=ib0"]
HOSTILE = ["it's", 'a "b" \\', "$(touch made)", "`touch made`", "{0} {run} %j", "a\nb; touch made", "ünï ☃", "-x #"]


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def started(script: str, folder: Path) -> list[str]:
    """What srun is told when bash runs the script: the stand-in writes its words down."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$WORDS"\n')
    srun.chmod(0o755)
    words = folder / "words"
    env = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "WORDS": str(words)}
    subprocess.run(
        ["bash"], input=script.encode(), env=env | {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}, check=True
    )
    return words.read_text().split("\0")[:-1]


def test_the_resources_of_a_node_are_those_of_the_machine() -> None:
    large = directives(slurm.script("train-vla/molmoact2", TWO, ["--partition=gpu", "--mem=0"]))
    resources = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=50", "--mem=784G"}
    assert resources < set(large) and large[-1] == "--partition=gpu --mem=0"
    small = directives(slurm.script("train-vlm/colors", [], []))
    elsewhere = ["machine.trainer_nodes=2", 'machine.cluster={address="ray:6379", trainer={}}']
    assert "--nodes=1" in directives(slurm.script("train-vlm/colors", elsewhere, []))
    assert {"--nodes=1", "--cpus-per-task=2", "--mem=16G"} < set(small) and "gpus" not in " ".join(small)
    assert {"--requeue", "--open-mode=append", "--job-name=train-vlm/colors"} < set(large) | set(small)


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_value_arrives_as_it_was_given(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / HOSTILE[0] / HOSTILE[2] / HOSTILE[3]
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    given = [f"machine.store={value}" for value in HOSTILE] + (TWO if nodes == 2 else [])
    words = started(slurm.script("train-vlm/colors", given, []), tmp_path)
    run = [sys.executable, "-m", "armature", "run", "train-vlm/colors", *(f"--set={each}" for each in given)]
    if nodes == 2:
        assert words[-2:] == ["--machine", "trainer_rendezvous=.armature/slurm/7-0"]
        assert words[-len(run) - 3 : -2] == [".armature/slurm/7-0", *run]
        assert (folder / ".armature/slurm/7-0").is_dir()
    else:
        assert words == ["--cpus-per-task=4", *run]
    assert not list(tmp_path.rglob("made"))


def test_the_first_node_runs_the_others_join_and_the_list_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = started(slurm.script("train-vla/molmoact2", TWO, []), tmp_path)
    node = words[words.index("bash") : words.index(sys.executable)]
    for rank, said, code in (("1", "-m armature join .armature/slurm/7-0", 3), ("0", "-m armature run x y", 3)):
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
        python.chmod(0o755)
        done = subprocess.run(
            [*node, python, "-m", "armature", "run", "x", "y"],
            env=os.environ | {"SLURM_PROCID": rank},
            capture_output=True,
            text=True,
        )
        assert (done.stdout.strip(), done.returncode, done.stderr) == (said, code, "")
        assert (tmp_path / ".armature/slurm/7-0").is_dir() == (rank == "1")


def test_what_cannot_be_submitted_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refused("invalid_sbatch_option", ascii("--comment=a\ntouch made")):
        slurm.script("train-vlm/colors", [], ["--comment=a\ntouch made"])
    with refused("force_in_job", "machine.force = tasks"):
        slurm.script("train-vlm/colors", ['machine.force=["tasks"]'], [])
    with refused("extra_forbidden", "trainer.max_stepz"):
        slurm.script("train-vlm/colors", ["trainer.max_stepz=3"], [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("sbatch_missing", "--slurm"):
        slurm.submit("train-vlm/colors", [], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run"], "only with --slurm"),
        (["--", "--partition=gpu"], "only with --slurm"),
        (["--slurm", "--watch"], "slurm-<job>.out"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["armature", "submit", "train-vlm/colors", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_dry_run_prints_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["armature", "submit", "train-vlm/colors", "--slurm", "--dry-run", "--set", "trainer.max_steps=3"]
    monkeypatch.setattr(sys, "argv", [*words, "--", "--partition=gpu", "--comment=a b"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert not ended.value.code and directives(printed)[-1] == '--partition=gpu "--comment=a b"'
    assert "--set=trainer.max_steps=3" in printed
    assert subprocess.run(["bash", "-n"], input=printed.encode()).returncode == 0
