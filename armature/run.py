"""`armature run`: a flow in this process, on the platform's Prefect server or on one of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from armature import supervisor
from armature.services import free_port, prefect_environment, prefect_server, wait_until_ready
from components.configuration import Recipe

SERVER_SECONDS = 180.0


@contextmanager
def prefect_api() -> Iterator[Callable[[], None]]:
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
        os.environ.update(service.environment)
        server = service.start()
        try:
            yield lambda: _wait(service, server)
        finally:
            server.stop()


def _wait(service: object, server: object) -> None:
    wait_until_ready(service, server, SERVER_SECONDS, lambda: None)  # type: ignore[arg-type]


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
            summary = flow(**dict(recipe.sections))
    for line in summary or ():
        print(line)
    sys.stdout.flush()


def _provide_gpu_limit() -> None:
    """The limit that GPU stages hold; `armature up` makes it as well."""
    from prefect.client.orchestration import get_client

    from armature.hardware import gpu_count

    if count := gpu_count():
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name("gpu", count)
