"""`armature run`: a flow in this process, on the platform's Prefect server or on one of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import ValidationError

from armature import supervisor
from armature.check import check_ahead
from armature.components.configuration import Recipe
from armature.components.contracts.errors import ArmatureError, ConfigurationError, ServerError
from armature.components.machine.project import project
from armature.ports import PREFECT_PORT
from armature.services import free_port, prefect_environment, prefect_server, wait_until_ready

if TYPE_CHECKING:
    from prefect import State

SERVER_SECONDS = 180.0
SENDING_SECONDS = 4.0


def joined_api() -> str | None:
    """The address of a Prefect API that is there, for this process from now on; None if none is named and none is up.

    In order: PREFECT_API_URL, the platform that is up in this folder.

    Raises:
        ServerError: the API does not answer, or wants another auth string.
    """
    given, platform = os.environ.get("PREFECT_API_URL"), supervisor.current()
    if platform and given in (None, "", platform.api_url):
        os.environ.update(prefect_environment(platform.api_url))
        os.environ.setdefault("MLFLOW_TRACKING_URI", platform.mlflow)
        given = platform.api_url
    if given:
        check_api(given)
    return given or None


@contextmanager
def prefect_api() -> Iterator[Callable[[], object]]:
    """A Prefect API for this process; call what is yielded when it is needed, to wait until it answers.

    One that is there, or a server for this run alone. That shares its database with the platform, so the run is on the
    dashboard afterwards, and starts while we import.

    Raises:
        ServerError: the API does not answer, or wants another auth string.
    """
    if joined_api():
        yield lambda: None
        return
    service = prefect_server(free_port(), with_pages=False)
    # The link in the log is to the page that `armature up` will serve: this server has none.
    os.environ.update({**service.environment, "PREFECT_UI_URL": f"http://127.0.0.1:{PREFECT_PORT}"})
    server = service.start()
    try:
        yield lambda: wait_until_ready(service, server, SERVER_SECONDS)
    finally:
        _send_what_is_left()
        server.stop()


def check_api(url: str) -> None:
    """
    Raises:
        ServerError: Prefect's API does not answer there, or wants another auth string.
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


def _send_what_is_left() -> None:
    """Logs and events that Prefect still holds: once the server is gone, it would try for a minute to send them."""
    if "prefect" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SENDING_SECONDS)
    EventsWorker.drain_all(timeout=SENDING_SECONDS)


def run_recipe(recipe: Recipe) -> list[str]:
    """Run the recipe's flow to its end. The lines that sum it up: results, reports, the run's page.

    Raises:
        ConfigurationError, DataError: what `check_ahead` says, before anything is started.
        ArmatureError: what the flow failed with.
    """
    print(f"{recipe.name}: {recipe.description}", flush=True)
    with project(recipe.folder):
        check_ahead(recipe)
        return _lines(_flow_state(recipe))


def _flow_state(recipe: Recipe) -> State[Any]:
    with prefect_api() as ready:
        flow = _imported_flow(recipe.kind)
        ready()
        _provide_gpu_limit()
        from prefect import tags

        try:
            with tags(f"deployment:{recipe.name.partition('/')[2]}"):
                state: State[Any] = flow(**dict(recipe.sections), return_state=True)
        except httpx.HTTPError as error:
            raise ServerError(
                f"Prefect's API no longer answers: {error!r:.300}",
                code="prefect_unavailable",
                where="PREFECT_API_URL",
                remedy="start it, then run again: it resumes from what was finished",
            ) from error
    return state


def _imported_flow(kind: str) -> Any:
    """
    Raises:
        ConfigurationError: Prefect refuses a variable of the environment.
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
    """What the flow returned; raises what it failed with."""
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        if isinstance(error, ArmatureError):
            raise error
        raise ArmatureError(str(state.message), code="run_failed", remedy="the lines above and the run's page say more")
    return list(state.result() or ())


def _provide_gpu_limit() -> None:
    """The limit that GPU stages hold; `armature up` makes it as well."""
    from prefect.client.orchestration import get_client

    from armature.components.machine.resources import gpu_count

    if count := gpu_count():
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name("gpu", count)
