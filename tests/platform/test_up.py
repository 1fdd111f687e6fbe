"""`armature up`: deployments are there, a person starts a sweep in the dashboard, and all ends with the platform."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from armature import deployments
from armature.components.configuration import load_recipe, recipe_names
from armature.components.configuration.recipes import RECIPES
from armature.components.configuration.stages import run_stage
from armature.components.models.settings import ModelSettings
from armature.services import free_port
from tests.builders import make_machine
from tests.platform.conftest import assert_closed
from tests.platform.dashboard import CHROMIUM, chromium, start_from_the_form, table_of_results
from tests.platform.prefect_api import PrefectApi

CHECKPOINTS = ["first", "second"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def make_checkpoints(folder: Path) -> None:
    """Make two hardly trained models with the sizes in the recipe. `folder`, where the platform runs, gets links to
    their artifacts."""
    model = load_recipe("evaluate/sweep").sections["model"].model_dump(mode="json")
    for seed, name in enumerate(CHECKPOINTS):
        tiny = model["tiny"] | {"seed": seed, "format": model["tiny"]["format"] | {"steps": 1}}
        settings = ModelSettings.model_validate(model | {"tiny": tiny})
        made = run_stage("model", settings, {}, make_machine(store=folder / ".armature/store"))
        (folder / name).symlink_to(made.path)


def armature(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "armature", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


class Platform:
    """A platform in a folder of its own, started by `armature up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = {"--prefect-server-port": str(free_port()), "--mlflow-port": str(free_port())}
        self.options = [part for pair in ports.items() for part in pair]

    def up(self) -> None:
        done = armature(self.folder, "up", "--detach", *self.options)
        assert done.returncode == 0, done.stdout + done.stderr
        state = self.folder / ".armature"
        self.record = json.loads((state / "platform.json").read_text())
        self.auth_string = (state / "prefect-auth-string").read_text()
        user, _, password = self.auth_string.partition(":")
        self.api = PrefectApi(base_url=f"{self.record['prefect']}/api", auth=(user, password))
        self.supervisor = int((state / "platform.lock").read_text())
        self.family = psutil.Process(self.supervisor).children(recursive=True)

    def change_sweep(self, server: str) -> None:
        """Change the parameters of the deployed sweep: it joins `server` and has fewer tasks."""
        sweep = self.api.get("/deployments/name/evaluate/sweep").json()
        parameters = sweep["parameters"]
        parameters["evaluation"]["max_tasks"] = 8
        parameters["machine"]["servers"]["endpoints"] = [server]
        assert self.api.patch(f"/deployments/{sweep['id']}", json={"parameters": parameters}).status_code == 204

    def assert_all_ended(self) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=30)
        assert not alive
        assert armature(self.folder, "status").returncode == 1


@pytest.fixture(scope="module")
def platform(tmp_path_factory, shared_server) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("platform")
    make_checkpoints(folder)
    started = Platform(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", shared_server.key)
        started.up()
    started.change_sweep(shared_server.url)
    yield started
    armature(folder, "down")


def test_platform_answers_and_has_every_flow(platform):
    assert httpx.get(f"{platform.record['mlflow']}/health").status_code == 200
    existing = platform.api.post("/deployments/filter", json={}).json()
    assert len(existing) == len(recipe_names())
    forms = {RECIPES[kind].FLOW: deployments.flow_of(kind).parameters.model_dump() for kind in RECIPES}
    assert {each["entrypoint"]: each["parameter_openapi_schema"] for each in existing} == forms
    (platform.folder / "mine.toml").write_text('flow = "train-vlm"\nextends = "train-vlm/colors"\n')
    colors = platform.api.get("/deployments/name/train-vlm/colors").json()["id"]
    nightly = [{"schedule": {"cron": "0 3 * * *"}, "active": False}]
    assert platform.api.post(f"/deployments/{colors}/schedules", json=nightly).status_code == 201
    deployed = armature(platform.folder, "deploy", "mine.toml", "train-vlm/colors")
    assert deployed.stdout.split() == ["train-vlm/mine", "train-vlm/colors"], deployed.stderr
    assert len(platform.api.get(f"/deployments/{colors}/schedules").json()) == 1
    mine = platform.api.get("/deployments/name/train-vlm/mine").json()
    assert mine["pull_steps"][1] == {deployments.USE_PROJECT: {"folder": "."}}
    assert mine["pull_steps"][0][deployments.SET_WORKING_DIRECTORY]["directory"] == str(platform.folder)
    second = armature(platform.folder, "up", *platform.options)
    assert second.returncode == 2 and "already running" in second.stderr


def test_platform_ports_are_closed_to_other_machines(platform, second_machine):
    assert_closed(second_machine, platform.family, {"prefect", "mlflow"})


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; on Debian: apt-get install chromium")
def test_dashboard_sweep_evaluates_each_checkpoint_with_each_seed(platform):
    dashboard = platform.record["prefect"]
    with chromium(dashboard, platform.auth_string) as browser:
        started = start_from_the_form(browser, platform.api, dashboard, CHECKPOINTS, ["3", "4"])
        assert started["parameters"]["sweep"] == {"checkpoints": CHECKPOINTS, "seeds": [3, 4]}
        ended = wait_for_end(platform.api, started["id"], seconds=600)
        assert ended["state_type"] == "COMPLETED", ended["state"]
        shown = table_of_results(browser, dashboard, started["id"])
    for checkpoint in CHECKPOINTS:
        for seed in (3, 4):
            assert f"{checkpoint}-seed{seed}" in shown


def wait_for_end(api: httpx.Client, run_id: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while True:
        run: dict[str, Any] = api.get(f"/flow_runs/{run_id}").json()
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        assert time.monotonic() < deadline, run["state_name"]
        time.sleep(1)


def test_all_programs_end_with_the_platform(platform):
    """Twice: by `armature down`, and by SIGKILL of the supervisor."""
    assert armature(platform.folder, "down").returncode == 0
    platform.assert_all_ended()
    platform.up()
    os.kill(platform.supervisor, signal.SIGKILL)
    platform.assert_all_ended()
