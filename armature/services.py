"""The programs of the platform (Prefect, MLflow, workers): how each is started and when it is ready."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from armature.components.contracts.errors import ConfigurationError, ServerError, keep_secret
from armature.components.contracts.installation import home_folder
from armature.components.machine.network import listening_process
from armature.components.machine.private_files import private_folder, sqlite_url, write_private
from armature.components.machine.process import Program
from armature.prefect_server import ALLOWED_HOSTS

STATE = home_folder() / ".armature"
LOGS = STATE / "logs"
LOCK = STATE / "platform.lock"
AUTH_STRING = STATE / "prefect-auth-string"
PREFECT_DATABASE, MLFLOW_DATABASE = STATE / "prefect/prefect.db", STATE / "mlflow.db"
HEARTBEAT_SECONDS = 30
"""Seconds between two heartbeats of a flow run."""
HOSTS = ("127.0.0.1", "localhost")
"""Host names under which the platform's servers accept requests."""


def auth_string() -> str:
    """Return the auth string of Prefect's API, user:password.

    It is the value of the environment variable PREFECT_SERVER_API_AUTH_STRING. If that is not set, it is read from the
    file `AUTH_STRING`, which is created with a new password if it does not exist.

    Raises:
        ConfigurationError: the auth string does not have the form user:password.
    """
    secret = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    from_file = secret is None
    if secret is None:
        write_private(AUTH_STRING, f"armature:{secrets.token_urlsafe(32)}", replace=False)
        AUTH_STRING.chmod(0o600)
        secret = AUTH_STRING.read_text(errors="replace").strip()
    if not re.fullmatch(r"[!-9;-~]+:[!-~]{8,}", secret):
        raise ConfigurationError(
            "the auth string of Prefect's API does not have the form user:password with a password of 8 characters",
            code="invalid_auth_string",
            where=str(AUTH_STRING) if from_file else "PREFECT_SERVER_API_AUTH_STRING",
            remedy="delete the file, and a new one is made" if from_file else "correct or unset the variable",
        )
    keep_secret(secret)
    keep_secret(secret.partition(":")[2])
    return secret


def own_origins(port: int) -> str:
    """Return the origins of pages that this machine serves on `port`: http://HOST:PORT, separated by commas."""
    return ",".join(f"http://{host}:{port}" for host in HOSTS)


def prefect_environment(api_url: str) -> dict[str, str]:
    """Return environment variables for the Prefect server and its clients: local files and no telemetry.

    Concurrency leases are on disk. If they were in memory, a restart of the server would end every run that holds one.
    """
    home = private_folder(STATE / "prefect").resolve()
    return {
        "ARMATURE_HOME": str(Path.cwd()),
        "DO_NOT_TRACK": "1",
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }


@dataclass(frozen=True)
class Service:
    """A program of the platform: its command, its environment and the URL that answers 200 once it is ready.

    A program without a `ready_url` is ready as soon as it runs.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    port: int | None = None

    @property
    def log(self) -> Path:
        """File that receives the program's output."""
        return LOGS / f"{self.name}.log"

    def start(self) -> Program:
        """Start the program under the process guard.

        Raises:
            ServerError: its port is in use.
        """
        if self.port is not None:
            refuse_taken_port(self.port, self.name)
        return Program(self.command, log=self.log.resolve(), env=self.environment)


def prefect_server(port: int, with_pages: bool = True) -> Service:
    """Return the Prefect server as a service.

    `with_pages` turns its web pages on; the server of a single run needs none.
    """
    url = f"http://127.0.0.1:{port}/api"
    environment = prefect_environment(url) | {
        ALLOWED_HOSTS: ",".join(HOSTS),
        "PREFECT_API_DATABASE_CONNECTION_URL": _prefect_database(),
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own_origins(port),
        "PREFECT_UI_ENABLED": "true" if with_pages else "false",
    }
    command = (sys.executable, "-m", "uvicorn", "--factory", "armature.prefect_server:create_app")
    options = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--lifespan", "on")
    return Service("prefect-server", command + options, environment, f"{url}/health", port)


def _prefect_database() -> str:
    """Return the URL of the Prefect server's database: from the environment, or a SQLite file in `.armature`."""
    url = os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL")
    return url or sqlite_url(PREFECT_DATABASE, "aiosqlite")


def mlflow_server(port: int) -> Service:
    """Return MLflow's server as a service. It shows all runs in this folder's SQLite file.

    Runs that use no server write to the same file.

    It accepts requests only under its own host names; MLflow's default accepts any host that begins like a private
    address. MLflow's job runner is off: it takes eight more processes and a minute to start, for features not used
    here.
    """
    artifacts = (STATE / "mlartifacts").resolve().as_uri()
    command = (sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    environment = {
        "DO_NOT_TRACK": "true",
        "MLFLOW_BACKEND_STORE_URI": sqlite_url(MLFLOW_DATABASE, "pysqlite"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{host}:{port}" for host in HOSTS),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": own_origins(port),
        "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    options = ("--default-artifact-root", artifacts, "--no-serve-artifacts")
    return Service("mlflow", command + options, environment, f"http://127.0.0.1:{port}/health", port)


def worker(pool: str, api_url: str, mlflow_url: str) -> Service:
    """Return a Prefect worker as a service. It runs the flows of a work pool as processes on this machine."""
    command = (sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"local-{pool}")
    return Service(f"worker-{pool}", command, prefect_environment(api_url) | {"MLFLOW_TRACKING_URI": mlflow_url})


def refuse_taken_port(port: int, name: str) -> None:
    """Check that a port of the loopback interface is free.

    Raises:
        ServerError: another program listens on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            process = listening_process(port)
            where, by, stop = f"127.0.0.1:{port}", "", ""
            with suppress(psutil.Error):
                if process is not None:
                    where = f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
                    folders, above = platforms(), process.parents()
                    if (folder := next((folders[each.pid] for each in above if each.pid in folders), None)) is not None:
                        by = f" by the platform in {folder}"
                        stop = f"stop that platform: cd {shlex.quote(str(folder))} && armature down; or "
            raise ServerError(
                f"port {port} is in use{by}, so {name} cannot start",
                code="port_in_use",
                where=where,
                remedy=f"{stop}use another port: --{name}-port",
            ) from error


def platforms() -> dict[int, Path]:
    """Return the folders in which platforms run on this machine, by the PIDs of their supervisors.

    Platforms of other users are missing if the system hides the folders of their processes.
    """
    folders: dict[int, Path] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            folder = Path(process.cwd()) if "up" in process.cmdline() else None
            if folder is not None and (folder / ".armature" / LOCK.name).read_text() == str(process.pid):
                folders[process.pid] = folder
    return folders


def answers(url: str) -> bool:
    """Check that a GET request to `url` is answered with status 200 within two seconds."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def runs_page(mlflow_url: str) -> str:
    """Return the address at which MLflow shows the runs of the experiment that changed last.

    Without `workflowType`, MLflow opens a page of traces, of which a training has none.
    """
    body = {"max_results": 2, "order_by": ["last_update_time DESC"]}
    try:
        answer = httpx.post(f"{mlflow_url}/api/2.0/mlflow/experiments/search", json=body, timeout=5.0, trust_env=False)
        experiments = answer.raise_for_status().json().get("experiments", [])
    except (httpx.HTTPError, ValueError):  # it does not answer, which `status` says beside the link
        experiments = []
    flows = [each["experiment_id"] for each in experiments if each["name"] != "Default"]
    place = f"/{flows[0]}/runs" if flows else ""
    return f"{mlflow_url}/#/experiments{place}?workflowType=machine_learning"


def wait_until_ready(service: Service, running: Program, seconds: float) -> None:
    """Wait until the service answers.

    Raises:
        ServerError: it ended or did not answer in time; the error shows the last lines of its log.
    """
    began = time.monotonic()
    while service.ready_url is not None and not answers(service.ready_url):
        waited = time.monotonic() - began
        if running.returncode is not None or waited > seconds:
            state = "is not up after" if running.returncode is None else f"ended ({running.returncode}) after"
            raise ServerError(
                f"{service.name} {state} {waited:.0f} s; its last lines:\n{running.tail(15)}",
                code="service_not_started",
                where=str(service.log),
                remedy="fix what the lines name, then start again",
            )
        time.sleep(0.1)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
