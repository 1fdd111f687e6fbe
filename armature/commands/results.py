"""Commands that show recipes, runs and their results, and check the artifact store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from armature.commands.arguments import MachineOverrides, Name, Overrides, Store, overrides

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


@app.command(epilog="Example: armature bundle 01b1698311d9 --out colors.zip")
def bundle(
    evaluation: Annotated[
        str, typer.Argument(help="The artifact of a finished evaluation: its folder, or its digest or the beginning.")
    ],
    out: Annotated[Path, typer.Option(help="The .zip file to write.")] = Path("bundle.zip"),
    store: Store = Path(".armature/store"),
) -> None:
    """Write what a stranger needs to check an evaluation to one .zip file.

    It has settings, versions, digests of policy and tasks, a row for each episode, and a few rollouts.
    """
    from armature.components.contracts.machine import Machine
    from armature.verify import bundle_evaluation

    bundle_evaluation(evaluation, out, Machine(store=str(store)))


@app.command(
    epilog="Examples: armature verify --store /shared/store; armature verify colors.zip; "
    "armature verify colors.zip --policy out --episodes 32"
)
def verify(
    bundle: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A bundle to check. Default: the artifacts of the store.", dir_okay=False),
    ] = None,
    policy: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The policy: a folder, a digest or NAME@REVISION. Default: it is found in the store."),
    ] = None,
    episodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Episodes to replay. Default: as many as --confidence and --share need."),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="Probability with which false rows are to be found.")
    ] = 0.99,
    share: Annotated[float, typer.Option(min=0.0001, max=1, help="Share of false rows that is to be found.")] = 0.05,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Seed of the choice of episodes, to repeat a check. Default: a random one."),
    ] = None,
    allow: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME", help="Code that the bundle names and that may be run; repeat for more."),
    ] = None,
    store: Store = Path(".armature/store"),
    machine: MachineOverrides = None,
) -> None:
    """Check an evaluation that others have made, or the artifacts of a store.

    Random episodes of a bundle are played again with the same policy. The result is compared bit for bit where versions
    and processor are the same, and by an exact test elsewhere.

    Without a bundle, every artifact of a store is read, and those whose files have changed are named. A run only
    compares sizes, times and inodes, and reads the files whose values differ.
    """
    from armature.components.configuration import section_of
    from armature.components.contracts.machine import Machine
    from armature.verify import verify as verify_store
    from armature.verify import verify_bundle

    if bundle is None:
        verify_store(store)
        return
    section = section_of(Machine, {"store": str(store)}, "--machine", machine or [])
    verify_bundle(
        bundle,
        section,
        policy,
        episodes=episodes,
        confidence=confidence,
        share=share,
        seed=seed,
        allowed=allow or (),
    )


@app.command(epilog="Examples: armature reproduce; armature reproduce colors; armature reproduce colors/after charts")
def reproduce(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[NAME]...", help="Numbers, or groups of them. Default: list them."),
    ] = None,
) -> None:
    """Measure numbers of the documentation again, and compare.

    Without a name, the numbers are listed, with their commands and hardware. It needs a checkout.
    """
    from armature.reproduce import reproduce as measure_again

    measure_again(names or [])


@app.command(epilog="Examples: armature drill; armature drill my/recipe.toml --runs 10 --seed 7 --folder drills")
def drill(
    recipe: Name = "train-vlm/colors",
    runs: Annotated[int, typer.Option(min=1, help="How many runs are disturbed.")] = 3,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Seed of the first run's faults; the next run has the next one. Default: random."),
    ] = None,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of the runs. A new one is removed unless a run fails.", file_okay=False),
    ] = None,
    minutes: Annotated[float, typer.Option(min=1, help="Time limit for everything.")] = 60,
    set_: Overrides = None,
    machine: MachineOverrides = None,
) -> None:
    """Kill and pause processes of short runs, and check that this changes nothing.

    A recipe of train-vlm or train-vla-rl is cut to a few steps and runs once undisturbed. Then its servers, ranks,
    simulators and whole runs are killed and paused at random times, and connections to a server are cut by a proxy.
    Every run has to end with the results of the undisturbed one, bit for bit; otherwise the first difference is shown.

    Only processes that these runs started are touched. The promise holds on CPU in float32.
    """
    import random

    from armature.drill.drill import drill as drill_recipe

    seed = random.randrange(10**6) if seed is None else seed
    drill_recipe(recipe, overrides(set_, machine), folder, runs, seed, minutes)
    print(f"all {runs} runs ended with the weights of the undisturbed one")
