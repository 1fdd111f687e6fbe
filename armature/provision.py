"""What a Prefect server must know before flows run on it: pools, the GPU limit, the watch over dead runs, deployments.

Run as a program (`python -m armature.provision [POOL ...]`, pools besides our own) with PREFECT_API_URL set, so that a
supervisor need not import Prefect. Doing it twice changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from armature.deployments import FILE, POOLS, write
from armature.hardware import gpu_count, package_version
from armature.services import HEARTBEAT_SECONDS, STATE
from components.private_files import private_folder

JOB_TEMPLATE = {
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    "job_configuration": {"stream_output": True},
}
"""A run is its deployment's flow. Prefect's own template lets each run name a command, a folder and an environment."""

WATCH = "armature: runs without a heartbeat are crashed"
WINDOW = timedelta(seconds=4 * HEARTBEAT_SECONDS)


def main() -> int:
    with get_client(sync_client=True) as client:
        for pool in dict.fromkeys([*POOLS, *sys.argv[1:]]):  # a worker would make one that takes commands
            template = WorkPoolCreate(name=pool, type="process", base_job_template=JOB_TEMPLATE)
            client.create_work_pool(template, overwrite=True)
        client.upsert_global_concurrency_limit_by_name("gpu", max(gpu_count(), 1))
        watch_for_dead_runs(client)
    return deploy(deployments_file())


def deployments_file() -> Path:
    """prefect.yaml of this folder; where there is none, the deployments of all recipes, under `.armature`."""
    if FILE.exists():
        return FILE
    written = private_folder(STATE) / FILE
    write(written)
    return written


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


def deploy(file: Path) -> int:
    """Register every deployment of the file, under the version of the code that is here."""
    environment = os.environ | {"ARMATURE_VERSION": package_version()}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
