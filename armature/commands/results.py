"""Commands that show recipes, runs and their results, and check the artifact store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from armature.commands.arguments import Overrides, Store

app = typer.Typer()


@app.command(
    epilog="Examples: armature show train-vlm/colors; armature show --toml train-vlm/colors > my.toml; "
    "armature show 1f0c2d...dir; armature show <run id>"
)
def show(
    what: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="A recipe, by name or file (its resolved values), a digest or an MLflow run (what it was made from)."
        ),
    ] = None,
    set_: Overrides = None,
    most: Annotated[int, typer.Option("--most", help="How many of a long series of steps to show.")] = 3,
    describe: Annotated[bool, typer.Option(help="Say of every setting of a recipe what it is.")] = False,
    toml: Annotated[
        bool, typer.Option("--toml", help="Only what a recipe does not take from the defaults: a file to start from.")
    ] = False,
) -> None:
    """Show a recipe's values, or everything that a result was made from.

    All values of a recipe are shown, and those that are not defaults are marked.

    Without an argument, the latest runs are listed.
    """
    from armature.show import show as show_it

    show_it(what, set_ or [], most, describe=describe, toml=toml)


@app.command(epilog="Examples: armature view; armature view --store /shared/store --port 8008 --no-browser")
def view(
    store: Store = Path(".armature/store"),
    port: Annotated[int, typer.Option(help="Port of the page on loopback; 0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a page that shows every run of a store, also while it runs.

    It shows curves, the rollouts of every step, tasks and failures, and compares two runs. Ctrl-C ends it.
    """
    import webbrowser

    from armature.components.viewer.app import serve

    def ready(address: str) -> None:
        print(f"{address}\nCtrl-C ends it", flush=True)
        if browser:
            webbrowser.open(address)

    serve(store, port, ready)


@app.command(epilog="Example: armature verify --store /shared/store")
def verify(
    store: Store = Path(".armature/store"),
) -> None:
    """Read every artifact of a store and name those whose files have changed.

    A run only compares sizes, times and inodes, and reads the files whose values differ.
    """
    from armature.verify import verify as verify_store

    verify_store(store)
