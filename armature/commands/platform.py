"""Commands that start, stop and show the platform: Prefect, a worker and MLflow."""

from __future__ import annotations

import shlex
from typing import Annotated, Optional

import typer

from armature.ports import MLFLOW_PORT, PREFECT_PORT

app = typer.Typer()


@app.command(epilog='Then: eval "$(armature env)" && prefect deployment run train-vlm/colors')
def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when all is up.")] = False,
    prefect_port: Annotated[
        int, typer.Option("--prefect-server-port", metavar="PORT", help="Port of the dashboard.")
    ] = PREFECT_PORT,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", metavar="PORT", help="Port of MLflow.")] = MLFLOW_PORT,
    pool: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="POOL",
            help="Work pool to serve here; repeat. Default: cpu, with a GPU all.",
        ),
    ] = None,
) -> None:
    """Start Prefect, a worker and MLflow.

    Ctrl-C ends them all.
    """
    from armature import supervisor

    pools = tuple(pool) if pool else supervisor.default_pools()
    if detach:
        options = ["--prefect-server-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
        raise typer.Exit(supervisor.detach([*options, *(part for each in pools for part in ("--pool", each))]))
    raise typer.Exit(supervisor.up(prefect_port, mlflow_port, pools))


@app.command()
def down() -> None:
    """Stop the platform that `armature up` started in this folder."""
    from armature import supervisor

    raise typer.Exit(supervisor.down())


@app.command()
def status() -> None:
    """Show which programs of this folder's platform answer."""
    from armature import supervisor

    raise typer.Exit(supervisor.status())


@app.command(epilog='Example: eval "$(armature env)" && prefect deployment run train-vlm/colors')
def env() -> None:
    """Print the variables with which a shell reaches this folder's platform, Prefect's password included."""
    from armature import supervisor

    for name, value in supervisor.environment().items():
        print(f"export {name}={shlex.quote(value)}")
