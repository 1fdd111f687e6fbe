"""Commands that take a recipe, or a stage of one."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from armature.commands.arguments import Force, JobVariables, MachineOverrides, Name, Names, Overrides, overrides
from armature.components.contracts.errors import ConfigurationError

app = typer.Typer()


@app.command(epilog="Example: armature init demo && cd demo && armature check recipe.toml && armature run recipe.toml")
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", file_okay=False)],
) -> None:
    """Write a small project: a recipe, sample data, a reward function and its test.

    It trains a tiny model in minutes, and is there to be changed.
    """
    from armature.init import write_project

    write_project(folder)
    print(f"written: {folder}")
    end_of_options = "-- " if str(folder).startswith("-") else ""
    print(
        f"next: cd {end_of_options}{shlex.quote(str(folder))} && armature check recipe.toml && armature run recipe.toml"
    )


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List the recipes."""
    from armature.components.configuration import load_recipe, recipe_names
    from armature.deployments import pool_of

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


@app.command(epilog="Examples: armature check train-vlm/colors; armature check train-vlm/chartqa --gpu h100")
def check(
    name: Name,
    set_: Overrides = None,
    machine: MachineOverrides = None,
    configuration_only: Annotated[bool, typer.Option(help="Do not start a server and the trainer.")] = False,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Compare the memory with these GPUs: a100 (80 GB), h100 or h200. Default: those here."),
    ] = None,
) -> None:
    """Say whether a recipe can run here.

    Its values, the memory of trainer and servers, this machine, and whether server and trainer agree on log-probs.
    """
    from armature.check import check_recipe
    from armature.components.configuration import load_recipe

    check_recipe(load_recipe(name, overrides(set_, machine)), configuration_only, gpu)


@app.command(epilog="Example: armature plan train-vlm/geometry3k --gpus 8 --gpus 64 --assume completion_tokens=300")
def plan(
    name: Name,
    gpus: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="How many there are; repeat for more. Default: 8, 64, 512; for train-vla-rl 1, 8.", min=1),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Which: a100 (80 GB), h100 or h200.")] = "h100",
    assume: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME=VALUE", help="Change an assumption that the plan prints; repeat for more."),
    ] = None,
    set_: Overrides = None,
    machine: MachineOverrides = None,
) -> None:
    """Say how long a step takes on many GPUs, what each holds, and what most of the step is spent on.

    Computed from the sizes of the model, data sheets and assumptions, which are printed. Nothing is started, and no
    weights are read.
    """
    from armature.components.configuration import load_recipe
    from armature.plan import plan_recipe

    for line in plan_recipe(load_recipe(name, overrides(set_, machine)), gpus or [], gpu, assume or []):
        print(line)


@app.command(epilog="Example: armature run train-vlm/colors --set trainer.max_steps=20 --machine servers=2")
def run(name: Name, set_: Overrides = None, machine: MachineOverrides = None, force: Force = None) -> None:
    """Run a recipe in this process.

    A Prefect server is started for it when none is up.
    """
    from armature.components.configuration import load_recipe
    from armature.run import run_recipe

    try:
        lines = run_recipe(load_recipe(name, overrides(set_, machine, force)))
    except KeyboardInterrupt:
        print("armature: interrupted; run it again to resume from here", file=sys.stderr, flush=True)
        os._exit(130)  # threads that wait for a server that is gone must not hold the terminal
    for line in lines:
        print(line)


@app.command(
    epilog="Examples: armature submit train-vlm/colors --set trainer.max_steps=20 --watch; "
    "armature submit train-vla/molmoact2 --slurm -- --partition=gpu --time=24:00:00"
)
def submit(
    name: Name,
    options: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[-- OPTION...]", help="With --slurm: more options of sbatch."),
    ] = None,
    set_: Overrides = None,
    machine: MachineOverrides = None,
    force: Force = None,
    job_variable: JobVariables = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print its log, and end as it ends.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="As a job of SLURM instead, which needs no platform.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --slurm: print the script that would be submitted.")
    ] = False,
) -> None:
    """Run a recipe's deployment on the platform's workers, or a recipe as a job of SLURM.

    Values are changed as by `armature run`, and checked before the run is made.
    """
    changed = overrides(set_, machine, force)
    if slurm:
        from armature import slurm as jobs

        if watch:
            raise typer.BadParameter("a job of SLURM is not watched: its log is slurm-<job>.out", param_hint="--watch")
        if job_variable:
            raise typer.BadParameter("a job of SLURM has options, after `--`", param_hint="--job-variable")
        said = jobs.script(name, changed, options or []) if dry_run else jobs.submit(name, changed, options or [])
        print(said)
        return
    if options or dry_run:
        raise typer.BadParameter("only with --slurm", param_hint="--dry-run" if dry_run else "OPTION")
    from armature.submit import submit as submit_run

    raise typer.Exit(submit_run(name, changed, watch, job_variable or []))


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

    artifact = run_one_stage(name, config, input_ or [], out, overrides(set_, machine, force))
    print(f"{artifact.digest}  {out or artifact.path}")


@app.command()
def deploy(recipes: Names = None) -> None:
    """Make deployments of recipes on the platform, or renew them.

    `armature up` does it for every installed recipe. A recipe of your own gets one here, by its file.
    """
    from armature.submit import deploy_recipes

    deploy_recipes(recipes or [])
