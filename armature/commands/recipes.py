"""Commands that list, check, plan, run, submit and deploy recipes, or run one of their stages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from armature.commands.arguments import Force, JobVariables, MachineOverrides, Name, Names, Overrides, overrides
from armature.components.contracts.errors import ConfigurationError

app = typer.Typer()


@app.command(epilog="Example: armature init demo && cd demo && armature check recipe.toml && armature run recipe.toml")
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", file_okay=False)],
) -> None:
    """Write a small project: a recipe, sample data, a reward function and its test.

    It trains a tiny model in minutes. Change it to make it your own.
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
    """List the recipes, grouped by the GPUs that they need."""
    from armature.components.configuration import load_recipe, recipe_names
    from armature.deployments import gpus_and_memory, pool_of

    rows: list[dict[str, Any]] = []
    for name in recipe_names():
        try:
            recipe = load_recipe(name)
            gpus, gib = gpus_and_memory(recipe)
            row = {"pool": pool_of(recipe), "gpus": gpus, "gpu_gib": gib, "description": recipe.description}
        except ConfigurationError as error:  # the other recipes are listed all the same
            row = {"pool": "-", "gpus": None, "gpu_gib": None, "description": f"cannot be used: {error.what}"}
        rows.append({"name": name, **row})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    # A line for each recipe where a program reads it; on a terminal, descriptions are wrapped beside the names.
    columns = max(shutil.get_terminal_size().columns, width + 24) if sys.stdout.isatty() else sys.maxsize
    needs = {(row["gpus"], row["gpu_gib"]) for row in rows}
    for gpus, gib in sorted(needs, key=lambda need: (need[0] is None, need[0] or 0, need[1] or 0)):
        print(f"{_heading(gpus, gib)}:")
        for row in rows:
            if (row["gpus"], row["gpu_gib"]) == (gpus, gib):
                begin = f"  {row['name']:<{width}}  "
                print(
                    textwrap.fill(
                        str(row["description"]),
                        columns,
                        initial_indent=begin,
                        subsequent_indent=" " * len(begin),
                        break_on_hyphens=False,
                    )
                )
        print()


def _heading(gpus: int | None, gib: int | None) -> str:
    """Return the heading of the recipes that need `gpus` GPUs with `gib` GiB of memory each.

    `gpus` is None for recipes that cannot be used, and `gib` is None if the size is not known.
    """
    if gpus is None:
        return "cannot be used"
    if gpus == 0:
        return "runs on this machine, without a GPU"
    return f"needs {'a GPU' if gpus == 1 else f'{gpus} GPUs'}" + (f" of {gib} GiB" if gib else "")


@app.command(epilog="Examples: armature check train-vlm/colors; armature check train-vlm/chartqa --gpu 24GiB")
def check(
    name: Name,
    set_: Overrides = None,
    machine: MachineOverrides = None,
    configuration_only: Annotated[bool, typer.Option(help="Do not start a server and the trainer.")] = False,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Compare the memory with this GPU: a100 (80 GB), h100, h200 or a size (24GiB). Default: those here."
        ),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="Also prove on a few rollouts that ten settings act.")
    ] = False,
) -> None:
    """Check that a recipe can run here.

    It checks the values, the memory of trainer and servers, this machine, and that server and trainer compute the same
    log-probs.
    """
    from armature.check import check_recipe
    from armature.components.configuration import load_recipe

    if settings and configuration_only:
        raise typer.BadParameter(
            "it needs a server and the trainer: leave --configuration-only out", param_hint="--settings"
        )
    check_recipe(load_recipe(name, overrides(set_, machine)), configuration_only, gpu, settings)


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
    """Estimate the time of a step, the memory of each GPU and the bottleneck for several numbers of GPUs.

    The estimate is computed from the model's sizes, data sheets and assumptions, which are printed. Nothing is started
    and no weights are read.
    """
    from armature.components.configuration import load_recipe
    from armature.plan import plan_recipe

    for line in plan_recipe(load_recipe(name, overrides(set_, machine)), gpus or [], gpu, assume or []):
        print(line)


@app.command(epilog="Example: armature run train-vlm/colors --set trainer.max_steps=20 --machine servers.count=2")
def run(name: Name, set_: Overrides = None, machine: MachineOverrides = None, force: Force = None) -> None:
    """Run a recipe in this process.

    If no Prefect server is running, one is started for this run.
    """
    from armature.components.configuration import load_recipe
    from armature.run import run_recipe

    try:
        lines = run_recipe(load_recipe(name, overrides(set_, machine, force)))
    except KeyboardInterrupt:
        print("armature: interrupted; run it again to resume from here", file=sys.stderr, flush=True)
        os._exit(130)  # do not wait for threads that wait for a server which is gone
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
    """Run a recipe's deployment on the platform's workers, or a recipe as a SLURM job.

    Values are changed as for `armature run`, and checked before the run is created.
    """
    changed = overrides(set_, machine, force)
    if slurm:
        from armature import slurm as jobs

        if watch:
            raise typer.BadParameter("a job of SLURM is not watched: its log is slurm-<job>.out", param_hint="--watch")
        if job_variable:
            raise typer.BadParameter("a job of SLURM has options, after `--`", param_hint="--job-variable")
        print(jobs.script(name, changed, options or []) if dry_run else jobs.submit(name, changed, options or []))
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
    metrics: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Also write the important metrics of the artifact to this file."),
    ] = None,
    set_: Overrides = None,
    machine: MachineOverrides = None,
    force: Force = None,
) -> None:
    """Run one stage without Prefect, as DVC does.

    An artifact that exists already is not made again, unless --force names the stage.
    """
    from armature.stage import run_one_stage

    artifact = run_one_stage(name, config, input_ or [], out, overrides(set_, machine, force), metrics)
    print(f"{artifact.digest}  {out or artifact.path}")


@app.command()
def deploy(recipes: Names = None) -> None:
    """Create or update deployments of recipes on the platform.

    `armature up` does this for every installed recipe. Give the file of your own recipe here.
    """
    from armature.submit import deploy_recipes

    deploy_recipes(recipes or [])
