"""The programs behind the platform: how each is started, and how one knows that it is up."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from armature.components.contracts.errors import ConfigurationError, ServerError, keep_secret
from armature.components.contracts.installation import home_folder
from armature.components.machine.network import listener
from armature.components.machine.private_files import private_folder, sqlite_url, write_private
from armature.components.machine.process import Program
from armature.prefect_server import ALLOWED_HOSTS

STATE = home_folder() / ".armature"
LOGS = STATE / "logs"
AUTH_STRING = STATE / "prefect-auth-string"
HEARTBEAT_SECONDS = 30
HOSTS = ("127.0.0.1", "localhost")


def auth_string() -> str:
    """What Prefect's API asks for: PREFECT_SERVER_API_AUTH_STRING, else this folder's secret, made when first needed.

    Raises:
        ConfigurationError: it is not of the form user:password.
    """
    given = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    if given is None:
        write_private(AUTH_STRING, f"armature:{secrets.token_urlsafe(32)}", replace=False)
        AUTH_STRING.chmod(0o600)
    found = AUTH_STRING.read_text(errors="replace").strip() if given is None else given
    if not re.fullmatch(r"[!-9;-~]+:[!-~]{8,}", found):
        raise ConfigurationError(
            "the auth string of Prefect's API is not of the form user:password, with a password of 8 characters",
            code="invalid_auth_string",
            where=str(AUTH_STRING) if given is None else "PREFECT_SERVER_API_AUTH_STRING",
            remedy="remove it, and a new one is made" if given is None else "correct it, or unset it",
        )
    keep_secret(found)
    keep_secret(found.partition(":")[2])
    return found


def own_origins(port: int) -> str:
    """The addresses of a page that this machine serves on the port, as browsers write them."""
    return ",".join(f"http://{host}:{port}" for host in HOSTS)


def prefect_environment(api_url: str) -> dict[str, str]:
    """Settings for the Prefect server and all that talk to it: local files, nothing sent anywhere.

    Leases on disk: kept in memory, a restart of the server would end every run that holds a concurrency slot.
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
    if given := os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL"):
        return given
    return sqlite_url(STATE / "prefect/prefect.db", "aiosqlite")


def mlflow_server(port: int) -> Service:
    """MLflow's pages over the SQLite file that runs without a server write to as well.

    It answers to its own names and pages alone; by itself it would take any host that begins as a private address.
    Its job runner (eight more processes, a minute of start) serves features that nothing here uses.
    """
    artifacts = (STATE / "mlartifacts").resolve().as_uri()
    command = (sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    environment = {
        "DO_NOT_TRACK": "true",
        "MLFLOW_BACKEND_STORE_URI": sqlite_url(STATE / "mlflow.db", "pysqlite"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{host}:{port}" for host in HOSTS),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": own_origins(port),
        "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    options = ("--default-artifact-root", artifacts, "--no-serve-artifacts")
    return Service("mlflow", command + options, environment, f"http://127.0.0.1:{port}/health", port)


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
                code="port_in_use",
                where=listener(port) or f"127.0.0.1:{port}",
                remedy=f"`armature down` ends what `armature up` started; or choose another: --{name}-port",
            ) from error


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
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
                code="service_not_started",
                where=str(service.log),
                remedy="fix what the lines name, then start again",
            )
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
