"""What a Prefect server must know before flows run on it: pools, the GPU limit, the watch over dead runs, deployments.

Run as a program (`python -m armature.provision [POOL ...]`, pools besides our own) with PREFECT_API_URL set, so that a
supervisor need not import Prefect. On Kubernetes pools have the template of a Job, in which $NAME is the environment's
variable, and deployments say what its pod needs. Doing it twice changes nothing.
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

JOB_TEMPLATE = {
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    "job_configuration": {"stream_output": True},
}
"""A run is its deployment's flow. Prefect's own template lets each run name a command, a folder and an environment."""

WATCH = "armature: runs without a heartbeat are crashed"
WINDOW = timedelta(seconds=4 * HEARTBEAT_SECONDS)


def main() -> int:
    parser = ArgumentParser(prog="python -m armature.provision", description=__doc__)
    parser.add_argument("pools", nargs="*", metavar="POOL")
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="base job template of the pools")
    parser.add_argument("--gpus", type=int, help="that runs may have together; those of this machine if left out")
    given = parser.parse_args()
    kind, template = "process", JOB_TEMPLATE
    if given.kubernetes is not None:
        written = Template(regular(given.kubernetes).read_text())
        kind, template = "kubernetes", json.loads(written.substitute(os.environ))
    with get_client(sync_client=True) as client:
        for name in dict.fromkeys([*POOLS, *given.pools]):  # a worker would make one that takes commands
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool, overwrite=True)
        client.upsert_global_concurrency_limit_by_name("gpu", max(given.gpus or gpu_count(), 1))
        watch_for_dead_runs(client)
        deploy(client)
    return 0


def watch_for_dead_runs(client: SyncPrefectClient) -> None:
    """A run whose process is gone sends no heartbeat; without this it would stay Running for ever."""
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
