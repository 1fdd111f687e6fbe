"""Set up a Prefect server for our flows: work pools, the GPU limit, an automation for dead runs, and deployments.

Runs of this folder whose process was killed are closed.

Run as a program with PREFECT_API_URL set (`python -m armature.provision [POOL ...]` with additional pools), so that the
supervisor need not import Prefect. On Kubernetes, work pools get a job template, in which $NAME stands for an
environment variable, and deployments name what their pod needs. Running it twice changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path
from string import Template

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from armature.components.contracts.files import regular
from armature.components.machine.resources import gpu_count
from armature.deployments import POOLS, deploy
from armature.services import HEARTBEAT_SECONDS
from armature.tasks.killed_runs import close_killed_runs

JOB_TEMPLATE = {
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    "job_configuration": {"stream_output": True},
}
"""Base job template of work pools that run flows as processes. With it, a run can only start the flow of its
deployment; Prefect's own template would let each run name a command, a folder and environment variables."""

WATCH = "armature: runs without a heartbeat are crashed"
"""Name of the automation that ends dead runs."""
WINDOW = timedelta(seconds=4 * HEARTBEAT_SECONDS)
"""Time without a heartbeat after which a run counts as dead."""


def main() -> int:
    parser = ArgumentParser(prog="python -m armature.provision", description=__doc__)
    parser.add_argument("pools", nargs="*", metavar="POOL")
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="base job template of the pools")
    parser.add_argument("--gpus", type=int, help="GPUs that all runs share; default: the GPUs of this machine")
    arguments = parser.parse_args()
    kind, template = "process", JOB_TEMPLATE
    if arguments.kubernetes is not None:
        text = Template(regular(arguments.kubernetes).read_text())
        kind, template = "kubernetes", json.loads(text.substitute(os.environ))
    with get_client(sync_client=True) as client:
        for name in dict.fromkeys([*POOLS, *arguments.pools]):  # a worker would create it with Prefect's own template
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool, overwrite=True)
        client.upsert_global_concurrency_limit_by_name("gpu", max(arguments.gpus or gpu_count(), 1))
        watch_for_dead_runs(client)
        close_killed_runs(client)
        deploy(client)
    return 0


def watch_for_dead_runs(client: SyncPrefectClient) -> None:
    """Create the automation with which Prefect sets a flow run without heartbeats to Crashed.

    Without it, the run of a killed process would stay Running forever.
    """
    ends = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ends},
        posture=Posture.Proactive,
        threshold=1,
        within=WINDOW,
    )
    action = ChangeFlowRunState(
        state=StateType.CRASHED,
        message=f"No heartbeat for {WINDOW.seconds} s: the process that ran this flow is gone.",
    )
    if not client.read_automations_by_name(WATCH):
        client.create_automation(AutomationCore(name=WATCH, trigger=trigger, actions=[action]))


if __name__ == "__main__":
    sys.exit(main())
