"""The stage demonstrations: it records episodes of the scripted policy in the simulator as a LeRobot dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.workers.pool import WorkerPool
from armature.components.pages.report import write_report
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.video import VideoWriter
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.source import RECORDED
from armature.components.robots.libero.demonstrations.episodes import (
    DemonstrationJob,
    DemonstrationJournal,
    Preview,
    demonstrations_report,
    jobs_of,
)
from armature.components.robots.libero.pro import base_suite
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome
from armature.components.robots.libero.settings import DemonstrationsStageSettings, SimulatorSettings
from armature.components.robots.libero.tasks import ACTION_NAMES, MAX_STEPS, STATE_NAMES, refuse_missing_shapes

ATTEMPTS = 3
"""Number of attempts at an episode whose simulator crashes."""

ROBOT = "panda"


def record(
    settings: DemonstrationsStageSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Record demonstrations and write `dataset/`, `failures.json`, `report.html` and `videos/`.

    `dataset/` (LeRobot v3.0) has the episodes that reached their goal, `failures.json` lists the others, and `videos/`
    has each task's first episode.

    Raises:
        ConfigurationError: the scripted policy does not support one of the tasks, or LIBERO or its assets are missing.
        DataError: no episode reached its goal.
        WorkerError: an episode's simulator crashed `ATTEMPTS` times.
    """
    jobs = jobs_of(settings.demonstrations)
    refuse_missing_shapes(dict.fromkeys(job.task for job in jobs), settings.simulator)
    journal = DemonstrationJournal(context.workspace / "episodes")
    _play(settings, jobs, journal, context)
    outcomes = {job: journal.outcome(job) for job in jobs}
    reached = [job for job in jobs if outcomes[job].success]
    failures = [_described(job, outcomes[job]) for job in jobs if not outcomes[job].success]
    (folder / "failures.json").write_text(json.dumps(failures, indent=1) + "\n")
    if not reached:
        raise DataError(
            f"not one of {len(jobs)} episodes reached its goal",
            code="no_goal_reached",
            where=f"the first: {failures[0]}",
        )
    previews = _write(settings, reached, journal, folder)
    page = demonstrations_report(outcomes, previews, settings.model_dump(mode="json"))
    write_report(folder / "report.html", page)
    frames = sum(outcomes[job].steps for job in reached)
    return StageReport(rows={"episodes": len(reached), "frames": frames}, drops={"goal not reached": len(failures)})


DEMONSTRATIONS_STAGE = Stage("demonstrations", 2, DemonstrationsStageSettings, (), record)


def _play(
    settings: DemonstrationsStageSettings,
    jobs: Sequence[DemonstrationJob],
    journal: DemonstrationJournal,
    context: StageContext,
) -> None:
    """Demonstrate the episodes that are not in the journal yet."""
    plan = settings.demonstrations

    def work(process: SimulatorProcess, job: DemonstrationJob) -> DemonstrationOutcome:
        limit = MAX_STEPS[base_suite(job.task.suite)]
        shown = process.demonstrate(job.task, job.initial_state, job.seed, plan.noise, limit)
        return journal.write(job, shown)

    left = [job for job in jobs if not journal.has(job)]
    done = len(jobs) - len(left)
    reached = sum(journal.outcome(job).success for job in jobs if job not in left)
    machine = context.machine

    def finished(outcome: DemonstrationOutcome) -> None:
        nonlocal done, reached
        done, reached = done + 1, reached + outcome.success
        context.events.progress("demonstrations", done, len(jobs), reached=reached / done)

    def simulator() -> SimulatorProcess:
        return SimulatorProcess(settings.simulator, machine.limits.environment_timeout)

    with WorkerPool(simulator, machine.playing_processes) as pool:
        pool.run(left, work, lambda job: job.task, finished, ATTEMPTS)


def _write(
    settings: DemonstrationsStageSettings, jobs: Sequence[DemonstrationJob], journal: DemonstrationJournal, folder: Path
) -> list[Preview]:
    """Write the dataset; return a preview of each task's first episode."""
    features = features_of(settings.simulator, settings.demonstrations.storage)
    previews: dict[int, Preview] = {}
    with create_dataset(
        folder / RECORDED,
        fps=settings.simulator.control_freq,
        robot_type=ROBOT,
        features=features,
        layout=settings.layout,
    ) as writer:
        for job in jobs:
            frames = journal.frames(job)
            writer.add_episode(frames, job.task.language)
            if job.task.index not in previews:
                images = [frames[name] for name, feature in features.items() if feature.is_visual]
                film = _film(settings, job, images[0], folder / "videos")
                previews[job.task.index] = Preview(job.task.language, images, film)
    return list(previews.values())


def _film(settings: DemonstrationsStageSettings, job: DemonstrationJob, images: Any, folder: Path) -> str | None:
    """Write a video of the first camera, if the layout has video settings; return its path relative to the report."""
    if settings.layout.video is None:
        return None
    path = folder / f"{job.name}.mp4"
    side = settings.simulator.resolution
    writer = VideoWriter(path, settings.simulator.control_freq, side, side, settings.layout.video)
    writer.append(images)
    writer.close()
    return f"{folder.name}/{path.name}"


def features_of(simulator: SimulatorSettings, storage: str) -> dict[str, Feature]:
    """Return the features of the dataset; cameras come first."""
    side = simulator.resolution
    camera = Feature(dtype=storage, shape=(side, side, 3), names=["height", "width", "channels"])
    cameras = {f"observation.images.{name}": camera for name in simulator.camera_name_mapping.values()}
    return {
        **cameras,
        "observation.state": Feature(dtype="float32", shape=(len(STATE_NAMES),), names=list(STATE_NAMES)),
        "action": Feature(dtype="float32", shape=(len(ACTION_NAMES),), names=list(ACTION_NAMES)),
    }


def _described(job: DemonstrationJob, outcome: DemonstrationOutcome) -> dict[str, Any]:
    task = job.task
    where = {"suite": task.suite, "task": task.index, "language": task.language}
    return {**where, "episode": job.number, "initial_state": job.initial_state, "seed": job.seed, **asdict(outcome)}
