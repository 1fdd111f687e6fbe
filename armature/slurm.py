"""`armature submit --slurm`: run a recipe as a SLURM job, which resumes after a lost node or the end of its time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from armature.components.configuration import load_recipe
from armature.components.contracts.cluster import ClusterSettings
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.deployments import SERVER_GIB, TRAINER_GIB, job_variables, machine_that_resumes

# Template of the script for sbatch.
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
# Command that starts the run if the job has no Ray cluster of its own.
_ONE_NODE = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "${run[@]}" &'
_RAY = """\
# One Ray cluster of all nodes of the job, with a token of its own.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 PATH={bin}:"$PATH"
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n') || exit
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000)) || exit
ended=$(mktemp) || exit
export RAY_AUTH_TOKEN head ended
# The launcher runs the recipe on the first node. On another one, Ray starts again if it is lost there. What an earlier
# start of the job left is ended first.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --label --wait=10 bash -c '
  while
    ray stop --force > /dev/null
    ray symmetric-run --address "$head" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_PER_TASK" -- "$@"
    [ "$SLURM_PROCID" -gt 0 ]
  do sleep 1; done
' node bash -c '"$@"; echo $? > "$ended"' run "${{run[@]}}" &"""
_END_OF_RAY = """\
# The launcher's exit code is 0 where Ray did not start, and srun's may be that of another node, which it has ended.
code=$(<"$ended")
rm "$ended"
code=${code:-1}
"""


def submit(name: str, overrides: Sequence[str], options: Sequence[str]) -> str:
    """Submit a recipe as a SLURM job and return the job's id.

    Raises:
        ConfigurationError: see `script`; or there is no sbatch, or sbatch refuses the job.
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
    """Return the script for sbatch, which runs `armature run`.

    If the address of the recipe's cluster is "auto", the script starts a Ray cluster on the job's nodes around the run.

    Args:
        options: options of sbatch; they replace those that follow from the recipe's machine section.

    Raises:
        ConfigurationError: `armature run` would refuse a value, `machine.force` names stages, or an option is not one
            line of text.
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
        start=_RAY.format(bin=shlex.quote(str(Path(sys.executable).parent))) if _own_cluster(machine) else _ONE_NODE,
        ended=_END_OF_RAY if _own_cluster(machine) else "",
    )


def _own_cluster(machine: Machine) -> ClusterSettings | None:
    """Return the settings of the Ray cluster that the job starts on its nodes, or None if it starts none."""
    return machine.cluster if machine.cluster is not None and machine.cluster.address == "auto" else None


def _resources(name: str, machine: Machine) -> list[str]:
    """Return the options of sbatch that follow from the machine settings.

    Each node gets the resources of a Kubernetes pod (`job_variables`). If the job starts a Ray cluster, each node also
    gets its share of the workers, servers and trainer ranks that run on the cluster.
    """
    node, cluster = job_variables(machine), _own_cluster(machine)
    gpus, cpus, memory = node["gpus"], int(node["cpus"]), int(node["memory"].removesuffix("Gi"))
    nodes = machine.trainer.nodes if cluster else 1
    if cluster is not None:
        workers = max(machine.workers.environments, machine.workers.rollouts, machine.workers.statistics)
        cpus += ceil(workers * cluster.num_cpus / nodes)
        servers = ceil(machine.servers.count / nodes)
        for bundle, count, gib in ((cluster.trainer, 1, TRAINER_GIB), (cluster.servers, servers, SERVER_GIB)):
            if bundle is not None:
                gpus += count * bundle.gpus
                cpus += count * bundle.num_cpus
                memory += count * ceil(max(bundle.memory_gib, gib * bundle.gpus))
    return [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        f"--mem={memory}G",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *(["--exclusive"] if cluster else []),  # the script stops every Ray process of its nodes
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@120",
    ]


def _words(options: Sequence[str]) -> str:
    """Return the options as one `#SBATCH` line, quoted. Unlike a shell, sbatch reads escapes only in double quotes."""
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
