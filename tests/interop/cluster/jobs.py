"""The Job of every recipe, as Prefect's own worker for Kubernetes renders it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from string import Template
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from armature.components.configuration import load_recipe, recipe_names
from armature.deployments import deployment

KUBERNETES = Path(__file__).parents[3] / "infra/kubernetes"
IMAGE = "registry.example/armature@sha256:" + "0" * 64
STANDALONE = "registry.example/armature-standalone@sha256:" + "1" * 64
RUN = FlowRun(id=UUID(int=1), flow_id=UUID(int=2), name="a-run")


def base_template() -> dict[str, Any]:
    """Return the base job template that provisioning gives to work pools on Kubernetes."""
    text = (KUBERNETES / "base/job-template.json").read_text()
    return json.loads(Template(text).substitute(IMAGE=IMAGE, STANDALONE_IMAGE=STANDALONE, NAMESPACE="armature"))


DEPLOYMENTS = [deployment(load_recipe(name), base_template()) for name in recipe_names()]


def rendered(variables: dict[str, Any]) -> dict[str, Any]:
    configuration = asyncio.run(
        KubernetesWorkerJobConfiguration.from_template_and_values(base_job_template=base_template(), values=variables)
    )
    configuration.prepare_for_flow_run(RUN, worker_name="worker")
    job = json.loads(json.dumps(configuration.job_manifest, default=str))
    job["metadata"]["name"] = "a-run"  # Kubernetes makes one of generateName
    return job
