"""`armature submit --slurm`: a recipe as a job of SLURM, which is taken up again when it loses a node or its time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.deployments import job_variables, machine_that_resumes

_SCRIPT = """\
#!/bin/bash
{directives}

# Back into the queue, to resume from the last checkpoint: shortly before the time limit, and if preempted.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
cd {folder} || exit
run=({run})
{start}
wait $!
code=$?
{ended}if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
_ONE_NODE = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "${run[@]}" &'
_SEVERAL_NODES = """\
rm -rf .armature/slurm/"$SLURM_JOB_ID"-*
rendezvous=.armature/slurm/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$rendezvous" || exit
run+=(--machine "trainer_rendezvous=$rendezvous")
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --label --kill-on-bad-exit=1 --wait=60 bash -c '
  rendezvous=$1 python=$2
  if [ "$SLURM_PROCID" -gt 0 ]; then exec "$python" -m armature join "$rendezvous"; fi
  "${@:2}"
  code=$?
  echo $code > "$rendezvous.code"
  rm -r "$rendezvous"
  exit $code
' node "$rendezvous" "${run[@]}" &"""
_END_OF_SEVERAL = """\
# Not srun's, which may be that of another node, whose program it has killed.
if [ -f "$rendezvous.code" ]; then code=$(<"$rendezvous.code") && rm "$rendezvous.code"; fi
"""


def submit(name: str, overrides: Sequence[str], options: Sequence[str]) -> str:
    """Submit what `script` writes; the job's id.

    Raises:
        ConfigurationError: as `script`; there is no sbatch, or it refuses the job.
    """
    text = script(name, overrides, options)
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=os.fsencode(text), capture_output=True)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "there is no sbatch on the PATH",
            code="sbatch_missing",
            where="--slurm",
            remedy="submit from a machine of the SLURM cluster; `--dry-run` prints the script anywhere",
        ) from error
    if done.returncode:
        raise ConfigurationError(
            f"SLURM does not take the job:\n{os.fsdecode(done.stderr).strip()}",
            code="slurm_job_refused",
            where="sbatch",
            remedy="change the options after `--`, or the recipe's machine; `--dry-run` prints what is submitted",
        )
    return os.fsdecode(done.stdout).strip().partition(";")[0]  # the name of the cluster may follow


def script(name: str, overrides: Sequence[str], options: Sequence[str]) -> str:
    """The script for sbatch: `armature run` on the first node, `armature join` on the others.

    Args:
        options: more options of sbatch, which override those that the recipe's machine gives.

    Raises:
        ConfigurationError: a value that `armature run` would refuse, a machine that forces stages, or an option that
            is not one line of text.
    """
    recipe = load_recipe(name, overrides)
    machine = machine_that_resumes(recipe)
    lines = [_words([each]) for each in _resources(recipe.name, machine)]
    if options:
        lines.append(_words(options))
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        folder=shlex.quote(str(Path.cwd())),
        run=shlex.join([sys.executable, "-m", "armature", "run", name, *(f"--set={each}" for each in overrides)]),
        start=_SEVERAL_NODES if machine.joining_nodes else _ONE_NODE,
        ended=_END_OF_SEVERAL if machine.joining_nodes else "",
    )


def _resources(name: str, machine: Machine) -> list[str]:
    """Options of sbatch; the memory of a node is what a pod of Kubernetes gets."""
    node = job_variables(machine)
    return [
        f"--job-name={name}",
        f"--nodes={1 + machine.joining_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={node['cpus']}",
        f"--mem={node['memory'].removesuffix('i')}",
        *([f"--gpus-per-node={node['gpus']}"] if node["gpus"] else []),
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@120",
    ]


def _words(options: Sequence[str]) -> str:
    """A line of `#SBATCH`: unlike a shell, sbatch knows no escape but in double quotes."""
    for option in options:
        if not option.isprintable():
            raise ConfigurationError(
                f"an option of sbatch is not one line of text: {option!r}",
                code="invalid_sbatch_option",
                where="after `--`",
            )
    return " ".join(
        each if re.fullmatch(r"[\w@%+=:,./-]+", each) else '"' + re.sub(r'(["\\])', r"\\\1", each) + '"'
        for each in options
    )
