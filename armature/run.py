"""`armature run`: run a flow in this process, with the platform's Prefect server or a server of its own."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import ValidationError

from armature import supervisor
from armature.check import check_ahead
from armature.components.configuration import Recipe
from armature.components.contracts.errors import ArmatureError, ConfigurationError, ServerError
from armature.components.contracts.installation import home_folder, installation_error
from armature.components.contracts.machine import Machine
from armature.components.machine.private_files import database_lock, private_folder
from armature.components.machine.project import project
from armature.components.viewer.address import viewer_address
from armature.ports import PREFECT_PORT
from armature.services import (
    LOGS,
    PREFECT_DATABASE,
    free_port,
    prefect_environment,
    prefect_server,
    wait_until_ready,
)

if TYPE_CHECKING:
    from prefect import State

SERVER_SECONDS = 180.0
"""Seconds until a Prefect server for this run has to answer."""
SENDING_SECONDS = 4.0
"""Seconds to wait, at the end of a run, until Prefect has sent its queued logs, and then its queued events."""


def joined_api() -> str | None:
    """Set this process up to use a running Prefect API, and return the API's address; None if there is no running API.

    The address is PREFECT_API_URL, if that variable is set. Otherwise it is the API of the platform in this folder.

    Raises:
        ServerError: the API does not answer, or rejects the auth string.
    """
    url, platform = os.environ.get("PREFECT_API_URL"), supervisor.current()
    if platform and url in (None, "", platform.api_url):
        os.environ.update(prefect_environment(platform.api_url))
        os.environ.setdefault("MLFLOW_TRACKING_URI", platform.mlflow)
        url = platform.api_url
    if url:
        check_api(url)
    return url or None


@contextmanager
def prefect_api() -> Iterator[Callable[[], object] | None]:
    """Provide a Prefect API for this process, and yield a function that waits until the API answers.

    A running API is used if there is one, and None is yielded. Otherwise a server is started for this run alone. It
    shares its database with the platform, so that the run is on the dashboard afterwards. It starts while this process
    imports the flow. Runs of one folder start their servers one after the other, because each migrates the database.

    Raises:
        ServerError: the API does not answer, or rejects the auth string.
    """
    if joined_api():
        yield None
        return
    service = prefect_server(free_port(), with_pages=False)
    # This server has no pages. Links in stored reports are to the pages that `armature up` will serve.
    os.environ.update({**service.environment, "PREFECT_UI_URL": f"http://127.0.0.1:{PREFECT_PORT}"})
    with ExitStack() as stack, ExitStack() as starting:
        starting.enter_context(database_lock(PREFECT_DATABASE))
        server = service.start()
        stack.callback(server.stop)
        stack.callback(_drain_prefect_queues)

        def wait() -> None:
            wait_until_ready(service, server, SERVER_SECONDS)
            starting.close()

        yield wait


def check_api(url: str) -> None:
    """Check that Prefect's API answers at `url`.

    Raises:
        ServerError: it does not answer, or rejects the auth string.
    """
    user, _, password = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
    try:
        auth = (user, password) if user else None
        answer = httpx.get(f"{url.rstrip('/')}/admin/version", auth=auth, timeout=10.0, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED
        raise ServerError(
            "Prefect's API rejects the auth string" if refused else f"Prefect's API does not answer: {error}",
            code="prefect_unavailable",
            where="PREFECT_API_URL",
            remedy='eval "$(armature env)" where the platform is up, or unset PREFECT_API_URL',
        ) from error


def _drain_prefect_queues() -> None:
    """Send the logs and events that Prefect has queued, before its server is stopped.

    Without the server, Prefect would retry for a minute.
    """
    if "prefect" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SENDING_SECONDS)
    EventsWorker.drain_all(timeout=SENDING_SECONDS)


def run_recipe(recipe: Recipe) -> list[str]:
    """Run a recipe's flow to its end in this process, as `armature run` does.

    Returns:
        The summary as lines: results, reports and the run's page.

    Raises:
        ConfigurationError, DataError: `check_ahead` found a problem; nothing was started.
        ArmatureError: the flow failed.

    Example:
        for line in run_recipe(load_recipe("train-vlm/colors", ["trainer.max_steps=5"])):
            print(line)
    """
    title = f"{recipe.name}: {recipe.description}" if recipe.description else recipe.name
    print(f"{title}\n{_where_to_look(recipe)}", flush=True)
    with project(recipe.folder):
        check_ahead(recipe)
        return _result(recipe)


def _where_to_look(recipe: Recipe) -> str:
    """Return a line that says how to watch the run now: the page of a running viewer, or the command that opens it."""
    store = home_folder() / recipe.machine.store
    if (address := viewer_address(store.resolve())) is not None:
        return f"watch it: {address}"
    option = "" if store == home_folder() / Machine().store else f" --store {shlex.quote(str(recipe.machine.store))}"
    return f"watch it: armature view{option}"


@contextmanager
def _run_log(has_pages: bool) -> Iterator[None]:
    """Write Prefect's log of a run to a file, and leave out of the terminal what `TerminalFilter` leaves out.

    On a terminal, log lines are written above the progress bar. An `ArmatureError` gets a note with the file's path.
    """
    from tqdm.contrib.logging import logging_redirect_tqdm

    from armature.tasks.logs import TerminalFilter

    path = private_folder(LOGS) / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    file, shown, root = logging.FileHandler(path, delay=True), TerminalFilter(has_pages), logging.getLogger()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    with ExitStack() as stack:
        for handler in root.handlers:
            handler.addFilter(shown)
            stack.callback(handler.removeFilter, shown)
        if sys.stderr.isatty():
            stack.enter_context(logging_redirect_tqdm())
        root.addHandler(file)
        stack.callback(file.close)
        stack.callback(root.removeHandler, file)
        try:
            yield
        except ArmatureError as error:
            error.add_note(f"log: {path}")
            raise


def _result(recipe: Recipe) -> list[str]:
    """Run the recipe's flow in this process and return its result, or raise the error that it failed with."""
    with prefect_api() as ready:
        flow = _imported_flow(recipe.kind)
        if ready is not None:
            ready()
        _prepare_server()
        from prefect import tags

        try:
            with _run_log(has_pages=ready is None), tags(f"deployment:{recipe.name.partition('/')[2]}"):
                return _lines(flow(**dict(recipe.sections), return_state=True))
        except httpx.HTTPError as error:
            raise ServerError(
                f"Prefect's API no longer answers: {error!r:.300}",
                code="prefect_unavailable",
                where="PREFECT_API_URL",
                remedy="start it, then run again: it resumes from what was finished",
            ) from error


def _imported_flow(kind: str) -> Any:
    """Import and return the Prefect flow of a kind of recipe (a key of `RECIPES`).

    Raises:
        ConfigurationError: Prefect refuses one of its environment variables.
    """
    try:
        from armature.deployments import flow_of

        return flow_of(kind)
    except ValidationError as error:
        wrong = [(str(each["loc"][-1]), each["msg"]) for each in error.errors() if each["loc"]]
        named = [
            key
            for field, _ in wrong
            for key in os.environ
            if key.startswith("PREFECT_") and key.lower().endswith(field)
        ]
        if not named:
            raise
        raise ConfigurationError(
            f"Prefect refuses a setting: {wrong[0][0]}: {wrong[0][1]}",
            code="invalid_prefect_setting",
            where=", ".join(named),
            remedy="correct the variable, or unset it",
        ) from error


def _lines(state: State[Any]) -> list[str]:
    """Return the lines of the flow's summary, which are its result. If the flow failed, raise its error."""
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        if isinstance(error, ArmatureError):
            raise error
        if (problem := installation_error(error)) is not None:
            raise problem
        raise ArmatureError(str(state.message), code="run_failed", remedy="the log has the traceback")
    return list(state.result() or ())


def _prepare_server() -> None:
    """Close killed runs of this folder, and create Prefect's concurrency limit "gpu", as `armature up` does.

    The limit has one slot for each GPU of this machine. A stage holds a slot for each GPU that it uses.
    """
    from prefect.client.orchestration import get_client

    from armature.components.machine.resources import gpu_count
    from armature.tasks.killed_runs import close_killed_runs

    with get_client(sync_client=True) as client:
        close_killed_runs(client)
        if count := gpu_count():
            client.upsert_global_concurrency_limit_by_name("gpu", count)
