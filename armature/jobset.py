"""`armature submit --jobset`: a training on several nodes of Kubernetes, which are replaced together."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import yaml  # type: ignore[import-untyped]

from armature.components.configuration import Recipe, load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.deployments import machine_that_resumes, pod_variables, pool_of
from armature.job_variables import parse_job_variables
from armature.submit import platform

_PREFIX = "jobset.sigs.k8s.io"
_RESTARTS = 20
_NODE = """\
rendezvous=.armature/jobsets/$1-$RESTART_ATTEMPT
trap 'kill $!; exit 143' TERM
if [ "$2" != first ]; then
  until [ -d "$rendezvous" ]; do sleep 1; done
  python -m armature join "$rendezvous" &
  wait $!
  exit
fi
rm -rf .armature/jobsets/"$1"-*
mkdir -p "$rendezvous" || exit
shift 2
"$@" --machine "trainer_rendezvous=$rendezvous" &
wait $!
code=$?
rm -r "$rendezvous"
exit $code
"""
"""The first process of a pod, which the kernel lets ignore SIGTERM unless it says otherwise."""


def manifest(name: str, overrides: Sequence[str], job_variables: Sequence[str]) -> dict[str, Any]:
    """The JobSet of a recipe.

    Args:
        job_variables: as `parse_job_variables` takes them.

    Raises:
        ConfigurationError: as `jobset`, or a variable is wrong.
        ServerError: there is no platform to ask for the template of pods.
    """
    recipe = load_recipe(name, overrides)
    template = template_of(recipe)
    return jobset(recipe, name, overrides, template, parse_job_variables(job_variables, template, pool_of(recipe)))


def submit(jobset: Mapping[str, Any], options: Sequence[str]) -> str:
    """Create a JobSet; its name.

    Args:
        options: of `kubectl create`.

    Raises:
        ConfigurationError: there is no kubectl, or the cluster refuses the JobSet.
    """
    command = ["kubectl", "create", "--filename=-", *options]
    try:
        done = subprocess.run(command, input=text(jobset), capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "there is no kubectl on the PATH",
            where="--jobset",
            remedy="install it; `--dry-run` prints the JobSet for another machine",
        ) from error
    if done.returncode:
        raise ConfigurationError(
            f"the cluster does not take the JobSet:\n{done.stderr.strip()}",
            where="kubectl create",
            remedy="change the options after `--`, or the recipe's machine; `--dry-run` prints what is created",
        )
    return str(jobset["metadata"]["name"])


def text(jobset: Mapping[str, Any]) -> str:
    """What `submit` gives to kubectl."""
    return str(yaml.safe_dump(dict(jobset), sort_keys=False, width=110))


def template_of(recipe: Recipe) -> dict[str, Any]:
    """The template of Jobs of the work pool that would run the recipe, as provisioning wrote it.

    Raises:
        ConfigurationError: the pool makes no Jobs of Kubernetes.
        ServerError: there is no platform here.
    """
    with platform() as client:
        pool = client.read_work_pool(pool_of(recipe))
    if pool.type != "kubernetes":
        raise ConfigurationError(
            f"work pool {pool.name!r} is of type {pool.type!r} and makes no pods",
            where=str(client.api_url),
            remedy="name the API of a platform on Kubernetes: PREFECT_API_URL and PREFECT_API_AUTH_STRING",
        )
    return pool.base_job_template


def jobset(
    recipe: Recipe,
    name: str,
    overrides: Sequence[str],
    template: Mapping[str, Any],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of `machine.trainer_nodes` pods, each as a run's Job has it.

    The first runs the recipe, the others `armature join`. If a pod is lost, all begin again and resume from the last
    checkpoint; if the run itself fails, with the exit code 1, they do not.

    Args:
        name: of the recipe, as pods load it.
        template: of the work pool.
        variables: of the template, in place of those that the recipe's machine gives.

    Raises:
        ConfigurationError: the training has one node, or the machine forces stages.
    """
    machine = machine_that_resumes(recipe)
    if not machine.joining_nodes:
        raise ConfigurationError(
            "a run on one node is a Job, not a JobSet",
            where="machine.cluster.trainer" if machine.trainer_bundle else "machine.trainer_nodes = 1",
            remedy="leave --jobset out: the platform's worker makes it; or set machine.trainer_nodes",
        )
    own = f"{re.sub('[^a-z0-9]+', '-', recipe.name.lower()).strip('-')[:40]}-{secrets.token_hex(3)}"
    job = _job(template, {"name": own, **pod_variables(recipe, template), **variables})
    kept = job.pop("ttlSecondsAfterFinished")
    run = ["python", "-m", "armature", "run", name, *(f"--set={each}" for each in overrides)]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": own, "labels": {"app.kubernetes.io/component": "run"}},
        "spec": {
            "ttlSecondsAfterFinished": kept,
            "network": {"enableDNSHostnames": False},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["first"]},
            "failurePolicy": {
                "maxRestarts": _RESTARTS,
                "rules": [
                    {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                _replicated("first", 1, job, [own, "first", *run]),
                _replicated("others", machine.joining_nodes, job, [own, "others"]),
            ],
        },
    }


def _job(template: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of a Job, as Prefect's worker fills in the template."""
    from prefect.utilities.templating import apply_values

    properties = template["variables"]["properties"]
    defaults = {key: each["default"] for key, each in properties.items() if "default" in each}
    filled = apply_values(template["job_configuration"]["job_manifest"], {**defaults, **values})
    specification: dict[str, Any] = deepcopy(filled["spec"])
    return specification


def _replicated(name: str, nodes: int, job: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    made = deepcopy(dict(job))
    (container,) = made["template"]["spec"]["containers"]
    container["args"] = ["sh", "-c", _NODE, "node", *words]
    container["env"] += [
        {
            "name": "PREFECT_API_AUTH_STRING",
            "valueFrom": {"secretKeyRef": {"name": "prefect", "key": "PREFECT_API_AUTH_STRING"}},
        },
        {
            "name": "RESTART_ATTEMPT",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_PREFIX}/restart-attempt']"}},
        },
    ]
    failed = {"containerName": container["name"], "operator": "In", "values": [1]}
    made |= {"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": failed}]}}
    made |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    return {"name": name, "replicas": 1, "template": {"spec": made}}
