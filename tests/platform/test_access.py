"""Access to a running platform: `armature up` in a folder of its own, with one flow that takes no time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from armature.services import free_port
from tests.platform.dashboard import CHROMIUM, chromium, open_page
from tests.platform.prefect_api import PrefectApi

REPOSITORY = Path(__file__).resolve().parents[2]
STRANGER = "http://attacker.example"
HOLD = """
import sys
from armature.tasks.killed_runs import alive

with alive(sys.argv[1]):
    print("alive", flush=True)
    input()
"""
CLOSE = """
from prefect.client.orchestration import get_client
from armature.tasks.killed_runs import close_killed_runs
with get_client(sync_client=True) as client:
    close_killed_runs(client)
"""
FLOW = """
from prefect import flow
from armature.components.contracts.machine import Machine

@flow
def hello(name: str, machine: Machine = Machine()):
    open(name, "w").close()
"""
PREFECT_YAML = """
pull:
- prefect.deployments.steps.set_working_directory: {directory: '{{ $ARMATURE_HOME }}'}
deployments:
- {name: world, entrypoint: 'hello.py:hello', parameters: {name: from-the-defaults}, work_pool: {name: cpu}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Up:
    """A platform that was started by `armature up --detach` in `folder`. `api` is a client of Prefect's API that sends
    the password if there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, (free_port(), free_port())
        (folder / "hello.py").write_text(FLOW)
        (folder / "prefect.yaml").write_text(PREFECT_YAML)
        ports = ("--prefect-server-port", str(self.ports[0]), "--mlflow-port", str(self.ports[1]))
        done = self.run("up", "--detach", "--pool", "cpu", "--pool", "of-my-own", *ports)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stdout
        self.prefect, self.mlflow = (f"http://127.0.0.1:{port}" for port in self.ports)
        secret = folder / ".armature/prefect-auth-string"
        self.secret = secret.read_text() if secret.exists() else ""
        user, _, password = self.secret.partition(":")
        self.api = PrefectApi(base_url=f"{self.prefect}/api", auth=(user, password) if user else None)
        deployed = self.shell("prefect --no-prompt deploy --all")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr

    def run(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "armature", *words]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            command,
            cwd=folder or self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in a shell that knows the platform only from the output of `armature env`."""
        line = f'eval "$({sys.executable} -m armature env)" && {Path(sys.executable).parent}/{line}'
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(self.folder / "of the shell")}
        return subprocess.run(
            line, shell=True, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def deployment(self) -> str:
        return str(self.api.get("/deployments/name/hello/world").json()["id"])

    def ended(self, run: str) -> str:
        for _ in range(240):
            state = str(self.api.get(f"/flow_runs/{run}").json()["state_type"])
            if state in ("COMPLETED", "FAILED", "CRASHED"):
                return state
            time.sleep(0.25)
        raise AssertionError(state)


@pytest.fixture(scope="module")
def up(tmp_path_factory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("up"))
    yield started
    started.run("down")


def test_requests_without_password_are_refused(up):
    for path, body in (("/flow_runs/filter", {}), ("/deployments/filter", {}), ("/work_pools/filter", {})):
        assert httpx.post(f"{up.prefect}/api{path}", json=body).status_code == 401
    start = f"{up.prefect}/api/deployments/{up.deployment()}/create_flow_run"
    assert httpx.post(start, json={}).status_code == 401
    assert httpx.post(start, json={}, auth=("armature", "a guess of mine")).status_code == 401
    assert (
        httpx.post(start, content=b"{}", headers={"content-type": "text/plain", "origin": STRANGER}).status_code == 401
    )


def test_foreign_origin_cannot_read(up):
    asked = {"origin": STRANGER, "access-control-request-method": "POST"}
    answer = up.api.options("/flow_runs/filter", headers=asked)
    assert answer.status_code == 400 and answer.headers.get("access-control-allow-origin") is None
    ours = up.api.options("/flow_runs/filter", headers=asked | {"origin": f"http://localhost:{up.ports[0]}"})
    assert ours.headers["access-control-allow-origin"] == f"http://localhost:{up.ports[0]}"
    write = httpx.post(
        f"{up.mlflow}/api/2.0/mlflow/experiments/create", json={"name": "x"}, headers={"origin": STRANGER}
    )
    assert write.status_code == 403


@pytest.mark.parametrize("host", ["attacker.example", "10.attacker.example", "127.0.0.1.attacker.example", ""])
def test_foreign_host_header_is_refused(up, host):
    """A page whose name is pointed at 127.0.0.1 is of the same origin as we are, for its browser."""
    headers = {"host": f"{host}:{up.ports[0]}"}
    assert up.api.post("/flow_runs/filter", json={}, headers=headers).status_code == 400
    assert httpx.get(f"{up.prefect}/", headers=headers).status_code == 400
    search = f"{up.mlflow}/api/2.0/mlflow/experiments/search?max_results=1"
    assert httpx.get(search, headers={"host": f"{host}:{up.ports[1]}"}).status_code == 403
    assert httpx.get(search).status_code == 200


def test_pool_templates_take_no_command(up):
    pools = {each["name"]: each for each in up.api.post("/work_pools/filter", json={}).json()}
    assert set(pools) >= {"cpu", "vllm-gpu", "train-gpu", "of-my-own"}
    for pool in pools.values():
        assert "command" not in json.dumps(pool["base_job_template"])


def test_run_cannot_bring_a_command(up):
    command = f"{sys.executable} -c \"open('{up.folder / 'owned'}', 'w')\""
    for variables in ({"command": command}, {"env": {"PYTHONSTARTUP": "x"}}, {"working_dir": "/"}):
        asked = {"job_variables": variables}
        assert up.api.post(f"/deployments/{up.deployment()}/create_flow_run", json=asked).status_code == 422
    # A run of no deployment is given to the pool without that check; the worker has no place for a command then.
    flow = up.api.post("/flows/", json={"name": "hello"}).json()["id"]
    state = {"type": "SCHEDULED"}
    asked = {"flow_id": flow, "work_pool_name": "cpu", "state": state, "job_variables": {"command": command}}
    answer = up.api.post("/flow_runs/", json=asked)
    assert answer.status_code == 201, answer.text
    assert up.ended(answer.json()["id"]) != "COMPLETED"
    assert not (up.folder / "owned").exists()


def test_plain_secret_in_run_parameters_is_refused(up):
    secret = "hf_DoNotStoreThisAnywhere"
    asked = {"parameters": {"name": "x", "machine": {"servers": {"environment": {"HF_TOKEN": secret}}}}}
    answer = up.api.post(f"/deployments/{up.deployment()}/create_flow_run", json=asked)
    assert answer.status_code in (409, 422), answer.text
    for file in (up.folder / ".armature").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_env_output_lets_a_shell_run_deployments(up):
    done = up.shell("prefect deployment run hello/world --param name=made --watch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (up.folder / "made").exists()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; on Debian: apt-get install chromium")
def test_pages_open_with_the_password(up):
    with chromium(up.prefect, up.secret) as browser:
        page = open_page(browser, f"{up.prefect}/deployments/deployment/{up.deployment()}")
        page.get_by_text("world", exact=True).first.wait_for()


def test_secrets_and_databases_are_private_files(up):
    state = up.folder / ".armature"
    files = [file for file in state.rglob("*") if file.is_file() and ".db" in file.name]
    assert {file.name for file in files} >= {"prefect.db", "mlflow.db", "prefect.db-wal"}
    for file in [*files, state / "prefect-auth-string", state / "platform.json"]:
        assert file.stat().st_mode & 0o077 == 0, file
    password = up.secret.partition(":")[2]
    assert len(password) >= 32
    for process in psutil.process_iter(["cmdline"]):
        assert password not in " ".join(process.info["cmdline"] or [])
    for log in (state / "logs").iterdir():
        assert password not in log.read_text()
    assert password not in up.said
    assert password.encode() not in (state / "prefect/prefect.db").read_bytes()


def test_second_platform_or_damaged_record_is_an_error(up):
    record = up.folder / ".armature/platform.json"
    whole = record.read_text()
    for damaged in ("", "{", '{"prefect": 3}', "[]", "\x00"):
        record.write_text(damaged)
        for words in (("status",), ("env",), ("up",)):
            done = up.run(*words)
            assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
            assert "armature down" in done.stderr
    record.write_text(whole)
    assert json.loads(whole)["prefect"] == up.prefect
    second = up.run("up")
    assert second.returncode == 2 and "already running" in second.stderr


def test_up_and_down_name_the_folder_of_another_platform(up, tmp_path):
    second = up.run("up", "--prefect-server-port", str(up.ports[0]), folder=tmp_path)
    assert second.returncode == 1 and "port_in_use" in second.stderr
    assert f"cd {up.folder} && armature down" in second.stderr
    for words in (("down",), ("status",)):
        assert str(up.folder) in up.run(*words, folder=tmp_path).stdout


def test_runs_of_killed_processes_of_this_host_are_closed(up):
    """A process that holds the lock of a flow run is killed. What closes its run is what `armature up` calls."""
    flow = up.api.post("/flows/", json={"name": "killed"}).json()["id"]
    running = {"flow_id": flow, "state": {"type": "RUNNING", "name": "Running"}}
    killed, living, elsewhere = (str(up.api.post("/flow_runs/", json=running).json()["id"]) for _ in range(3))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD, run], cwd=up.folder, env=environment, **pipes)
        for run in (killed, living)
    ]
    for process in processes:
        assert process.stdout.readline() == b"alive\n"
    processes[0].kill()
    processes[0].wait()
    (up.folder / f".armature/flow-runs/{elsewhere}.lock").write_text("another-host")
    try:
        done = up.shell(f"python -c '{CLOSE}'")
        assert done.returncode == 0, done.stdout + done.stderr
        states = [up.api.get(f"/flow_runs/{run}").json()["state_type"] for run in (killed, living, elsewhere)]
        assert states == ["CRASHED", "RUNNING", "RUNNING"]
    finally:
        processes[1].communicate(b"\n")


def test_platform_is_found_after_the_clock_changed(up):
    """When a program started is read from the clock: after a step, the time that is told is not the one noted."""
    record = up.folder / ".armature/platform.json"
    whole = record.read_text()
    record.write_text(json.dumps(json.loads(whole) | {"started": 1.0}))
    done = up.run("status")
    record.write_text(whole)
    assert done.returncode == 0 and up.prefect in done.stdout, done.stdout + done.stderr
    assert re.search(r"/#/experiments\S*workflowType=machine_learning", done.stdout)


def test_down_stops_the_platform_despite_a_damaged_record(up):
    """The platform is found by the supervisor's lock, even after a clock change or with a damaged record."""
    record: dict[str, Any] = json.loads((up.folder / ".armature/platform.json").read_text())
    (up.folder / ".armature/platform.json").write_text(json.dumps(record | {"started": 1.0})[:-9])
    done = up.run("down")
    assert done.returncode == 0 and "down" in done.stdout, done.stdout + done.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{up.prefect}/api/health")
    assert up.run("status").returncode == 1
