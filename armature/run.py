"""`armature run`: a flow in this process, on the platform's Prefect server or on one of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from armature import supervisor
from armature.hardware import PREFECT_PORT
from armature.services import free_port, prefect_environment, prefect_server, wait_until_ready
from components.configuration import Recipe
from components.contracts.errors import ArmatureError

if TYPE_CHECKING:
    from prefect import State

SERVER_SECONDS = 180.0


@contextmanager
def prefect_api() -> Iterator[Callable[[], object]]:
    """A Prefect API for this process; call what is yielded when it is needed, to wait until it answers.

    In order: PREFECT_API_URL, the platform that is up in this folder, a server for this run alone. The last shares
    its database with the platform, so the run is on the dashboard afterwards, and starts while we import.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield lambda: None
    elif platform := supervisor.current():
        os.environ.update(prefect_environment(platform.api_url))
        os.environ.setdefault("MLFLOW_TRACKING_URI", platform.mlflow)
        yield lambda: None
    else:
        service = prefect_server(free_port(), with_pages=False)
        # The link in the log is to the page that `armature up` will serve: this server has none.
        os.environ.update({**service.environment, "PREFECT_UI_URL": f"http://127.0.0.1:{PREFECT_PORT}"})
        server = service.start()
        try:
            yield lambda: wait_until_ready(service, server, SERVER_SECONDS)
        finally:
            server.stop()


def run_recipe(recipe: Recipe) -> None:
    """Run the recipe's flow to its end.

    Raises:
        ArmatureError: what the flow failed with.
    """
    print(f"{recipe.name}: {recipe.description}", flush=True)
    with prefect_api() as ready:
        from armature.deployments import flow_of

        flow = flow_of(recipe.name)
        ready()
        _provide_gpu_limit()
        from prefect import tags

        with tags(f"deployment:{recipe.name.partition('/')[2]}"):
            state = flow(**dict(recipe.sections), return_state=True)
    _report(state)


def _report(state: State[Any]) -> None:
    """Print what the flow returned, or leave with what it failed with."""
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        if isinstance(error, ArmatureError):
            raise error
        raise ArmatureError(str(state.message), remedy="the lines above and the run's page say more")
    for line in state.result() or ():
        print(line)


def _provide_gpu_limit() -> None:
    """The limit that GPU stages hold; `armature up` makes it as well."""
    from prefect.client.orchestration import get_client

    from armature.hardware import gpu_count

    if count := gpu_count():
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name("gpu", count)
