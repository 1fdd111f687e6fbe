"""The programs behind the platform: how each is started, and how one knows that it is up."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from components.contracts.errors import ServerError
from components.ports import listener
from components.process import Program

STATE = Path(".armature")
LOGS = STATE / "logs"
HEARTBEAT_SECONDS = 30


def prefect_environment(api_url: str) -> dict[str, str]:
    """Settings for the Prefect server and all that talk to it: local files, nothing sent anywhere.

    Leases on disk: kept in memory, a restart of the server would end every run that holds a concurrency slot.
    """
    home = (STATE / "prefect").resolve()
    home.mkdir(parents=True, exist_ok=True)
    return {
        "ARMATURE_HOME": str(Path.cwd()),
        "DO_NOT_TRACK": "1",
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": os.environ.get(
            "PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{home / 'prefect.db'}"
        ),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }


@dataclass(frozen=True)
class Service:
    """A program of the platform. `ready_url` answers 200 when it is up; None: it is up while it runs."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    port: int | None = None

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    def start(self) -> Program:
        """
        Raises:
            ServerError: the port is taken.
        """
        if self.port is not None:
            refuse_taken_port(self.port, self.name)
        return Program(self.command, log=self.log.resolve(), env=self.environment)


def prefect_server(port: int, with_pages: bool = True) -> Service:
    """The Prefect server; without pages when it only serves one run."""
    url = f"http://127.0.0.1:{port}/api"
    environment = prefect_environment(url) | {"PREFECT_UI_ENABLED": "true" if with_pages else "false"}
    command = (sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app")
    options = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--lifespan", "on")
    return Service("prefect-server", command + options, environment, f"{url}/health", port)


def mlflow_server(port: int) -> Service:
    """MLflow's pages over the SQLite file that runs without a server write to as well.

    Its job runner (eight more processes, a minute of start) serves features that nothing here uses.
    """
    database = f"sqlite:///{(STATE / 'mlflow.db').resolve()}"
    artifacts = f"file://{(STATE / 'mlartifacts').resolve()}"
    command = (sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port))
    options = ("--workers", "1", "--backend-store-uri", database, "--default-artifact-root", artifacts)
    environment = {
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    url = f"http://127.0.0.1:{port}/health"
    return Service("mlflow", (*command, *options, "--no-serve-artifacts"), environment, url, port)


def worker(pool: str, api_url: str, mlflow_url: str) -> Service:
    """A worker that runs the pool's flows as processes of this machine."""
    command = (sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"local-{pool}")
    return Service(f"worker-{pool}", command, prefect_environment(api_url) | {"MLFLOW_TRACKING_URI": mlflow_url})


def refuse_taken_port(port: int, name: str) -> None:
    """
    Raises:
        ServerError: something listens on the port already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} is in use, so {name} cannot start",
                where=listener(port) or f"127.0.0.1:{port}",
                remedy=f"`armature down` ends what `armature up` started; or choose another: --{name}-port",
            ) from error


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until_ready(service: Service, running: Program, seconds: float) -> None:
    """Return when the service answers.

    Raises:
        ServerError: it ended, or did not answer in time; its last lines are shown.
    """
    began = time.monotonic()
    while service.ready_url is not None and not answers(service.ready_url):
        waited = time.monotonic() - began
        if running.returncode is not None or waited > seconds:
            state = "is not up after" if running.returncode is None else f"ended ({running.returncode}) after"
            raise ServerError(
                f"{service.name} {state} {waited:.0f} s; its last lines:\n{running.tail(15)}",
                where=str(service.log),
                remedy="mend what the lines name, then start again",
            )
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
