"""The script of `armature submit --slurm`; tests/production/test_slurm.py submits it to SLURM itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from armature import slurm
from tests.refusals import refused

TRAINER = "trainer={num_cpus=32, num_gpus=8, memory_gib=800}"
TWO = [
    "machine.trainer.nodes=2",
    "machine.trainer.processes=8",
    "machine.trainer.gpus=[]",
    f'machine.cluster={{address="auto", {TRAINER}}}',
]
HOSTILE = ["it's", 'a "b" \\', "$(touch made)", "`touch made`", "{0} {run} %j", "a\nb; touch made", "ünï ☃", "-x #"]


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def started(script: str, folder: Path) -> list[str]:
    """Run a job script with bash and return the arguments that it passes to srun. A stand-in for srun records them."""
    (folder / "bin").mkdir()
    for name, body in (("srun", 'printf "%s\\0" "$@" > "$WORDS"'), ("scontrol", "echo node1")):
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    words = folder / "words"
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "WORDS": str(words), "TMPDIR": str(folder)}
    subprocess.run(["bash"], input=script.encode(), env=env | {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"})
    return words.read_text().split("\0")[:-1]


def test_slurm_node_gets_the_resources_of_the_machine_section():
    large = directives(slurm.script("train-vla/molmoact2", TWO, ["--partition=gpu", "--mem=0"]))
    resources = {"--nodes=2", "--exclusive", "--gpus-per-node=8", "--cpus-per-task=42", "--mem=816G"}
    assert resources < set(large) and large[-1] == "--partition=gpu --mem=0"
    placed = ["machine.servers.count=3", 'machine.cluster={address="auto", trainer={num_gpus=1}, servers={num_cpus=5}}']
    both = directives(slurm.script("train-vlm/colors", ["machine.trainer.nodes=2", *placed], []))
    assert {"--nodes=2", "--gpus-per-node=1", "--cpus-per-task=16", "--mem=112G"} < set(both)
    small = directives(slurm.script("train-vlm/colors", [], []))
    elsewhere = ["machine.trainer.nodes=2", 'machine.cluster={address="ray:6379", trainer={}}']
    assert "--nodes=1" in directives(slurm.script("train-vlm/colors", elsewhere, []))
    assert {"--nodes=1", "--cpus-per-task=2", "--mem=16G"} < set(small) and "gpus" not in " ".join(small)
    assert {"--requeue", "--open-mode=append", "--job-name=train-vlm/colors"} < set(large) | set(small)


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_script_passes_values_unchanged(nodes, tmp_path, monkeypatch):
    folder = tmp_path / HOSTILE[0] / HOSTILE[2] / HOSTILE[3]
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    arguments = [f"machine.store={value}" for value in HOSTILE] + (TWO if nodes == 2 else [])
    words = started(slurm.script("train-vlm/colors", arguments, []), tmp_path)
    run = [sys.executable, "-m", "armature", "run", "train-vlm/colors", *(f"--set={each}" for each in arguments)]
    assert words[0] == "--cpus-per-task=4" and words[-len(run) :] == run
    assert (len(words) == len(run) + 1) == (nodes == 1)
    assert not list(tmp_path.rglob("made"))


def test_rejects_recipes_that_slurm_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    ("words", "output"),
    [
        (["--dry-run"], "only with --slurm"),
        (["--", "--partition=gpu"], "only with --slurm"),
        (["--slurm", "--watch"], "slurm-<job>.out"),
    ],
)
def test_rejects_options_without_effect(words, output, armature):
    done = armature("submit", "train-vlm/colors", *words)
    assert done.code == 2 and output in done.stderr


def test_dry_run_prints_the_script(armature):
    words = ["--slurm", "--dry-run", "--set", "trainer.max_steps=3", "--", "--partition=gpu", "--comment=a b"]
    done = armature("submit", "train-vlm/colors", *words)
    assert not done.code and directives(done.stdout)[-1] == '--partition=gpu "--comment=a b"'
    assert "--set=trainer.max_steps=3" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout.encode()).returncode == 0
