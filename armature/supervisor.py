"""`armature up`: start the platform's programs, watch them, and stop all of them when it ends.

It is a program, not a set of shell jobs: a Prefect worker started with `&` ignores the first SIGTERM, and nothing would
stop the other programs when one dies. Every program runs under the process guard, so that even `kill -9` of the
supervisor leaves no program behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TextIO

from pydantic import TypeAdapter, ValidationError

from armature.components.contracts.errors import ConfigurationError, DataError, ServerError
from armature.components.machine.private_files import database_lock, private_folder, write_private
from armature.components.machine.process import Program, program
from armature.components.machine.resources import gpu_count
from armature.deployments import without_worker
from armature.services import (
    AUTH_STRING,
    LOCK,
    LOGS,
    MLFLOW_DATABASE,
    PREFECT_DATABASE,
    STATE,
    Service,
    answers,
    auth_string,
    mlflow_server,
    platforms,
    prefect_environment,
    prefect_server,
    runs_page,
    wait_until_ready,
    worker,
)

RECORD = STATE / "platform.json"
READY_SECONDS, STOP_SECONDS = 180.0, 60.0
"""Seconds until a program has to be ready, and until `armature down` kills a supervisor that does not stop."""


@dataclass(frozen=True)
class Platform:
    """Addresses and worker pools of the platform that runs in this folder."""

    prefect: str
    mlflow: str
    pools: tuple[str, ...]

    @property
    def api_url(self) -> str:
        """URL of Prefect's API."""
        return f"{self.prefect}/api"


def supervisor_pid() -> int | None:
    """Return the PID of the supervisor that runs in this folder, or None.

    The supervisor holds a lock on a file. Unlike a stored PID, a lock cannot be stale.
    """
    if not LOCK.exists():
        return None
    with LOCK.open(errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(text) if (text := file.read()).isdigit() else None
    return None


def current() -> Platform | None:
    """Return the platform that runs in this folder, or None.

    Raises:
        DataError: it runs, but the file with its addresses is damaged.
    """
    if supervisor_pid() is None or not RECORD.exists():
        return None
    try:
        return TypeAdapter(Platform).validate_json(RECORD.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"the file with the running platform's addresses is damaged: {error.errors()[0]['msg']}",
            code="platform_record_damaged",
            where=str(RECORD),
            remedy="`armature down`, then `armature up`",
        ) from error


def _lock(file: TextIO) -> bool:
    """Try for a second to lock the file; return True on success.

    One try is not enough: another process that calls `supervisor_pid` holds the lock for a moment.
    """
    for _ in range(20):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


@contextmanager
def _locked() -> Iterator[None]:
    """Hold the lock of this folder's supervisor for the length of the block.

    Raises:
        ConfigurationError: another supervisor holds it.
    """
    private_folder(LOGS)
    with LOCK.open("a+") as file:
        if not _lock(file):
            running = current()
            raise ConfigurationError(
                f"the platform is already running: {running.prefect if running else 'it is starting'}",
                code="platform_already_running",
                where=f"process {supervisor_pid()}",
                remedy="armature down",
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        RECORD.unlink(missing_ok=True)
        try:
            yield
        finally:
            RECORD.unlink(missing_ok=True)


def default_pools() -> tuple[str, ...]:
    """Return the work pools that this machine can serve: all of them if it has a GPU, otherwise only "cpu"."""
    return ("cpu", "vllm-gpu", "train-gpu") if gpu_count() else ("cpu",)


def up(prefect_port: int, mlflow_port: int, pools: tuple[str, ...]) -> int:
    """Start the platform and watch its programs until an interruption, or until one of them dies. Return the exit code.

    Raises:
        ConfigurationError: the platform is running already.
        ServerError: a port is in use, or a program does not become ready.
    """
    prefect, mlflow = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
    # Both signals end the platform in the same way. SIGINT is set too, because a shell may have set it to be ignored.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    with _locked(), ExitStack() as stack:
        try:
            children = _start(stack, Platform(prefect, mlflow, pools))
            stack.callback(_stop_together, children.values())
            return _watch(children)
        except KeyboardInterrupt:
            _say("stopping")
            return 0


def _start(stack: ExitStack, platform: Platform) -> dict[str, Program]:
    """Start all programs of the platform, print their states, and return the programs by name.

    Workers start after the servers are ready and the deployments exist. `stack` stops the programs.
    """
    first = [
        prefect_server(int(platform.prefect.rpartition(":")[2])),
        mlflow_server(int(platform.mlflow.rpartition(":")[2])),
    ]
    workers = [worker(pool, platform.api_url, platform.mlflow) for pool in platform.pools]
    began = time.monotonic()
    for service in first:
        _say(f"{service.name:<16} starting      log: {service.log}")
    with database_lock(PREFECT_DATABASE), database_lock(MLFLOW_DATABASE):  # a run may be creating their tables now
        children = {service.name: _enter(stack, service) for service in first}
        for service in first:
            wait_until_ready(service, children[service.name], READY_SECONDS)
            _say(f"{service.name:<16} up after {time.monotonic() - began:.0f} s")
    _provision(platform)
    for service in workers:
        children[service.name] = _enter(stack, service)
        _say(f"{service.name:<16} started       log: {service.log}")
    for pool, count in without_worker(platform.pools).items():
        _say(f"{f'pool {pool}':<16} no worker     its deployments ({count}) cannot run here: armature up --pool {pool}")
    write_private(RECORD, json.dumps(asdict(platform)))
    _say(f"\n  flows      {platform.prefect}\n  tracking   {runs_page(platform.mlflow)}\n")
    _say(f"  The pages of the flows ask for a password: the line in {AUTH_STRING}")
    _say('  eval "$(armature env)" && prefect deployment run train-vlm/colors     armature down  or Ctrl-C ends it')
    return children


def _enter(stack: ExitStack, service: Service) -> Program:
    """Start a program; `stack` stops it when the stack closes."""
    child = service.start()
    stack.callback(child.stop)
    return child


def _stop_together(children: Iterable[Program]) -> None:
    """Stop all programs at the same time, because each takes seconds."""
    with ThreadPoolExecutor() as executor:
        list(executor.map(Program.stop, children))


def _provision(platform: Platform) -> None:
    """Create the work pools and deployments on the Prefect server, in a process of its own."""
    began = time.monotonic()
    log = LOGS / "provision.log"
    command = [sys.executable, "-m", "armature.provision", *platform.pools]
    with program(command, log=log.resolve(), env=prefect_environment(platform.api_url)) as child:
        if child.wait() != 0:
            raise ServerError(
                f"the pools and deployments could not be set up; the last lines:\n{child.tail(20)}",
                code="deployments_not_set_up",
                where=str(log),
                remedy="read the whole log; `armature list` says whether every recipe is valid",
            )
    _say(f"{'deployments':<16} set in {time.monotonic() - began:.0f} s    log: {log}")


def _watch(children: dict[str, Program]) -> int:
    """Wait until one of the programs ends, print its last lines, and return exit code 1."""
    while True:
        for name, child in children.items():
            if child.returncode is not None:
                _say(f"{name} ended ({child.returncode}), so all is stopped; its last lines:\n{child.tail(15)}")
                return 1
        time.sleep(0.5)


def detach(arguments: list[str]) -> int:
    """Start the supervisor as a process in a session of its own, and show its output until the platform is up.

    Return exit code 0 if the platform is up, and another exit code if it failed to start.
    """
    log = private_folder(LOGS) / "supervisor.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "armature", "up", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    shown = 0
    while True:
        text = log.read_text()
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if child.poll() is not None:
            return child.returncode or 1
        if supervisor_pid() == child.pid and current():
            return 0
        time.sleep(0.2)


def down() -> int:
    """Stop the platform that runs in this folder and return the exit code. Platforms of other folders keep running."""
    if (pid := supervisor_pid()) is None:
        _say(f"no platform is running here{_elsewhere()}")
        if RECORD.exists():
            RECORD.unlink()
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while supervisor_pid() == pid:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # the process guards then stop its programs
        time.sleep(0.1)
    RECORD.unlink(missing_ok=True)
    _say("down")
    return 0


def _elsewhere() -> str:
    """Return a line for each platform of another folder of this machine, each after a line break."""
    return "".join(f"\n  one runs in {folder} (process {pid})" for pid, folder in platforms().items())


def environment() -> dict[str, str]:
    """Return the environment variables that tell clients of Prefect and MLflow the addresses of this platform.

    Raises:
        ConfigurationError: no platform runs in this folder.
    """
    if not (platform := current()):
        raise ConfigurationError(
            "no platform is running here",
            code="platform_not_running",
            where=str(STATE.resolve()),
            remedy="armature up --detach",
        )
    return {
        "PREFECT_API_URL": platform.api_url,
        "PREFECT_API_AUTH_STRING": auth_string(),
        "MLFLOW_TRACKING_URI": platform.mlflow,
    }


def status() -> int:
    """Print which programs of the platform answer. Return exit code 1 if no platform runs in this folder, else 0."""
    platform = current()
    if platform is None:
        _say(f"no platform is running here; `armature up` starts it{_elsewhere()}")
        return 1
    for name, url in (("flows", f"{platform.api_url}/health"), ("tracking", f"{platform.mlflow}/health")):
        _say(f"{name:<10} {url.removesuffix('/api/health').removesuffix('/health'):<28} "
             f"{'answers' if answers(url) else 'does not answer'}")  # fmt: skip
    _say(f"{'runs':<10} {runs_page(platform.mlflow)}")
    _say(f"{'password':<10} of the page of flows: {AUTH_STRING}")
    _say(f"{'pools':<10} {', '.join(platform.pools)}   (supervisor: process {supervisor_pid()})")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. It is the handler of SIGTERM and SIGINT."""
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, flush=True)
