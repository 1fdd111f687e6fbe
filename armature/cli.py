"""The command `armature`. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from armature.hardware import MLFLOW_PORT, PREFECT_PORT
from components.contracts.errors import ArmatureError, ConfigurationError

app = typer.Typer(
    help="Post-training of vision-language models as flows that can be repeated.",
    epilog="First steps: armature list; armature check train-vlm/colors; armature run train-vlm/colors",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
deployments_app = typer.Typer(help="prefect.yaml, written from configs/.", no_args_is_help=True)
app.add_typer(deployments_app, name="deployments")

Name = Annotated[str, typer.Argument(help="A recipe: <flow>/<deployment>, as `armature list` shows them.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this annotation at run time)
    typer.Option(
        "--set", metavar="A.B=VALUE", help="Change a value (TOML syntax; a bare word is a string); A.B= leaves it out."
    ),
]
MachineOverrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--machine", metavar="KEY=VALUE", help="Change a fact of the machine: --machine servers=2."),
]
Force = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(metavar="STAGE", help="Make a stage again, and all that depends on it; repeat for more."),
]


def _overrides(settings: list[str] | None, machine: list[str] | None, force: list[str] | None = None) -> list[str]:
    forced = [f"machine.force={json.dumps(force)}"] if force else []
    return [*(settings or []), *(f"machine.{each}" for each in machine or []), *forced]


@app.command(epilog="Example: armature run train-vlm/colors --set trainer.max_steps=20 --machine servers=2")
def run(name: Name, set_: Overrides = None, machine: MachineOverrides = None, force: Force = None) -> None:
    """Run a recipe in this process.

    A Prefect server is started for it when none is up.
    """
    from armature.run import run_recipe
    from components.configuration import load_recipe

    try:
        lines = run_recipe(load_recipe(name, _overrides(set_, machine, force)))
    except KeyboardInterrupt:
        print("armature: interrupted; run it again to resume from here", file=sys.stderr, flush=True)
        os._exit(130)  # threads that wait for a server that is gone must not hold the terminal
    for line in lines:
        print(line)


@app.command(
    epilog="Example: armature stage tasks --config configs/train-vlm/colors.toml --out data/tasks",
)
def stage(
    name: Annotated[str, typer.Argument(help="A registered stage: tasks, model, train-vlm, evaluate, ...")],
    config: Annotated[Path, typer.Option(help="The recipe's file.", dir_okay=False)],
    input_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--input", metavar="NAME=FOLDER", help="An input artifact; repeat for each."),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Also link the artifact to this folder.")] = None,  # noqa: UP045
    set_: Overrides = None,
    machine: MachineOverrides = None,
    force: Force = None,
) -> None:
    """Run one stage, without Prefect.

    This is what DVC does. Nothing is made twice, unless it is forced.
    """
    from armature.stage import run_one_stage

    artifact = run_one_stage(name, config, input_ or [], out, _overrides(set_, machine, force))
    print(f"{artifact.digest}  {out or artifact.path}")


@app.command(
    epilog="The first node says which: armature join .armature/store/workspaces/train-vla-.../trainer/trainer.json"
)
def join(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="The training's trainer.json, in the store that nodes share.")
    ],
) -> None:
    """Take part in a training on several nodes, as another node than the first.

    Ends when the training ends.
    """
    from components.training.join import join as take_part

    take_part(job)


@app.command(epilog="Examples: armature setup; armature setup --folder .venv-vllm; TORCH_BACKEND=cpu armature setup")
def setup(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Where to make it. Default: .venv-vllm in a checkout, else the user's data folder, where runs in any "
            "folder find it. .venv-vllm in the folder of a run comes first.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Make the environment of the model servers: vLLM for this machine, and Armature's plug-in.

    It takes minutes and gigabytes. An environment that is there is replaced.
    """
    from armature.setup.command import make_server_environment

    make_server_environment(folder)


@app.command(epilog="Example: armature check train-vlm/colors")
def check(
    name: Name,
    set_: Overrides = None,
    machine: MachineOverrides = None,
    configuration_only: Annotated[bool, typer.Option(help="Do not start a server and the trainer.")] = False,
) -> None:
    """Say whether a recipe can run here.

    Its values, this machine, and whether server and trainer agree on log-probs.
    """
    from armature.check import check_recipe
    from components.configuration import load_recipe

    check_recipe(load_recipe(name, _overrides(set_, machine)), configuration_only)


@app.command(epilog="Examples: armature show train-vlm/colors; armature show 1f0c2d...dir; armature show <run id>")
def show(
    what: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A recipe (its resolved values), a digest or an MLflow run (what it was made from)."),
    ] = None,
    set_: Overrides = None,
    most: Annotated[int, typer.Option("--most", help="How many of a long series of steps to show.")] = 3,
    describe: Annotated[bool, typer.Option(help="Say of every setting of a recipe what it is.")] = False,
) -> None:
    """Show a recipe, or what a result was made from.

    A recipe is shown with all of its values, and what it does not take from the defaults is marked.

    Without an argument, the latest runs.
    """
    from armature.show import show as show_it

    show_it(what, set_ or [], most, describe)


@app.command(epilog="Example: armature export data/train-vla my-policy")
def export(
    source: Annotated[Path, typer.Argument(help="What train-vla made, or a folder in the released layout.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    base: Annotated[
        str, typer.Option(help="The released checkpoint that LeRobot takes tokenizer and image processor from.")
    ] = "allenai/MolmoAct2",
) -> None:
    """Write a robot policy as LeRobot saves and loads it."""
    from armature.export import export_policy

    print(export_policy(source, out, base))


@app.command(epilog="Example: armature verify --store /shared/store")
def verify(
    store: Annotated[Path, typer.Option(help="Folder of the artifact store.")] = Path(".armature/store"),
) -> None:
    """Read every artifact of a store, and name those that are not as they were made.

    A run compares sizes, times and inodes, and reads what differs.
    """
    from armature.verify import verify as verify_store

    verify_store(store)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List the recipes."""
    from armature.deployments import pool_of
    from components.configuration import load_recipe, recipe_names

    rows = []
    for name in recipe_names():
        try:
            recipe = load_recipe(name)
            rows.append({"name": name, "pool": pool_of(recipe), "description": recipe.description})
        except ConfigurationError as error:  # of this recipe alone
            rows.append({"name": name, "pool": "-", "description": f"cannot be used: {error.what}"})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['pool']:<9}  {row['description']}")


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
    """End what `armature up` started in this folder."""
    from armature import supervisor

    raise typer.Exit(supervisor.down())


@app.command()
def status() -> None:
    """Say what is up."""
    from armature import supervisor

    raise typer.Exit(supervisor.status())


@app.command(epilog='Example: eval "$(armature env)" && prefect deployment run train-vlm/colors')
def env() -> None:
    """Print how a shell reaches what `armature up` started, Prefect's password included."""
    from armature import supervisor

    for name, value in supervisor.environment().items():
        print(f"export {name}={shlex.quote(value)}")


@deployments_app.command("write")
def deployments_write() -> None:
    """Write prefect.yaml from the recipes."""
    from armature import deployments

    deployments.write()
    print(f"written: {deployments.FILE}")


@deployments_app.command("check")
def deployments_check() -> None:
    """Fail when prefect.yaml does not say what the recipes say."""
    from armature import deployments

    deployments.check()
    print(f"{deployments.FILE} fits configs/")


@app.command(
    "train-multimodal",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: armature train-multimodal @ configs/vf-rl/test-multimodal.toml",
)
def train_multimodal(
    arguments: Annotated[Optional[list[str]], typer.Argument(metavar="@ FILE")] = None,  # noqa: UP045
) -> None:
    """Train from a TOML file of four tables.

    They are model, [env], [inference] and [trainer]; the model server is started as well.
    """
    from armature.train_multimodal import train

    train(arguments or [])


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong, 130 a run was interrupted."""
    try:
        app(standalone_mode=True)
    except ConfigurationError as error:
        print(f"armature: {error}", file=sys.stderr)
        sys.exit(2)
    except ArmatureError as error:
        print(f"armature: {error}", file=sys.stderr)
        sys.exit(1)
