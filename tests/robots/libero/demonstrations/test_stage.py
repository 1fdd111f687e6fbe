"""Recorded demonstrations: replaying the dataset's actions reaches the goal, and a crash repeats only one episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.digests import file_digest
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import StageContext, StageReport
from armature.components.robots.datasets.source import open_sources
from armature.components.robots.libero.demonstrations.episodes import (
    DemonstrationJournal,
    Preview,
    demonstrations_report,
    jobs_of,
)
from armature.components.robots.libero.demonstrations.stage import record
from armature.components.robots.libero.processes import Demonstration
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome
from armature.components.robots.libero.settings import DemonstrationSettings, DemonstrationsStageSettings
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import ACTION_NAMES, STATE_NAMES
from tests.builders import make_machine
from tests.refusals import refused

from ..simulated import needs_libero, simulator

pytestmark = needs_libero

TASK = "pick up the black bowl between the plate and the ramekin and place it on the plate"


def plan(**changes: Any) -> DemonstrationSettings:
    values: dict[str, Any] = {"suite": "libero_spatial", "tasks": [0], "episodes_per_task": 2, "seed": 3}
    values |= {"first_initial_state": 48, "noise": 0.0, "storage": "image"}
    return DemonstrationSettings.model_validate(values | changes)


def settings(**changes: Any) -> DemonstrationsStageSettings:
    layout = {"video": {"codec": "libx264", "quality": 20, "keyframe_every": 10}}
    one_camera = simulator(camera_name_mapping={"agentview": "image"}).model_dump()
    return DemonstrationsStageSettings.model_validate(
        {"simulator": one_camera, "demonstrations": plan(**changes).model_dump(), "layout": layout}
    )


class Counted(TerminalEvents):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self.done.append(done)


def run(root: Path, chosen: DemonstrationsStageSettings, processes: int = 1) -> tuple[StageReport, Path, list[int]]:
    events = Counted()
    machine = make_machine(workers__environments=processes, environment_timeout=300)
    context = StageContext(machine, events, ThreadUnits(), root / "workspace", root / "images", "f")
    out = root / f"out-{len(list(root.glob('out-*')))}"
    out.mkdir(parents=True)
    return record(chosen, {}, out, context), out, events.done


def files(folder: Path) -> dict[str, str]:
    """Return the digest of each file."""
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.slow
def test_recorded_actions_reach_the_goal_and_crash_repeats_one_episode(tmp_path: Path) -> None:
    chosen = settings()
    report, out, done = run(tmp_path, chosen)
    dataset = open_sources(out)[0].dataset
    assert done == [1, 2] and dict(report.rows) == {"episodes": 2, "frames": dataset.info.total_frames}
    assert json.loads((out / "failures.json").read_text()) == []
    assert dict(dataset.tasks) == {0: TASK} and dataset.info.fps == 20 and dataset.info.robot_type == "panda"
    assert dataset.info.features["action"].names == list(ACTION_NAMES)
    assert dataset.info.features["observation.state"].names == list(STATE_NAMES)
    assert [path.name for path in (out / "videos").iterdir()] == ["libero_spatial-00-00000.mp4"]

    job = jobs_of(chosen.demonstrations)[1]
    columns = dataset.columns(["action", "observation.state"], dataset.episodes[1])
    made = LiberoSimulator(job.task, chosen.simulator)
    made.reset(job.initial_state, job.seed)
    first = made.observe()
    assert np.array_equal(first.state, columns["observation.state"][0])
    for name, image in first.images.items():
        (stored,) = dataset.images(name, dataset.episodes[1], [0])
        assert np.array_equal(np.asarray(stored), image)
    reached = [made.step(action) for action in columns["action"]]
    made.close()
    assert reached[-1] and not reached[0]

    (lost,) = (tmp_path / "workspace/episodes").glob("*-00001.npz")
    lost.rename(lost.with_suffix(".part"))  # as a crash leaves it
    _, again, done = run(tmp_path, chosen, processes=2)
    assert done == [2]
    with np.load(lost.with_suffix(".part")) as before, np.load(lost) as after:
        for name in before.files:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert files(again) == files(out)


def test_episodes_use_stored_states_in_order_and_own_seeds() -> None:
    few, more = jobs_of(plan(tasks=[3, 0])), jobs_of(plan(tasks=[], episodes_per_task=60))
    expected = [(task, number, 48 + number) for task in (3, 0) for number in range(2)]
    assert [(job.task.index, job.number, job.initial_state) for job in few] == expected
    assert set(few) < set(more) and len(more) == 600  # what an episode is does not hang on how many there are
    assert {job.initial_state for job in more} == set(range(50))
    assert len({job.seed for job in more}) == 600
    assert not {job.seed for job in few} & {job.seed for job in jobs_of(plan(tasks=[3, 0], seed=4))}


@pytest.mark.parametrize(("suite", "tasks"), [("libero_goal", [1, 5]), ("libero_10", [])])
def test_rejects_tasks_that_the_scripted_policy_cannot_do(suite: str, tasks: list[int]) -> None:
    with refused("task_not_scripted", suite):
        jobs_of(plan(suite=suite, tasks=tasks))


def test_rejects_video_storage_without_settings() -> None:
    values = settings(storage="video").model_dump()
    values["layout"]["video"] = None
    with refused("value_error", "layout.video"):
        DemonstrationsStageSettings.model_validate(values)


def shown(length: int, outcome: DemonstrationOutcome) -> Demonstration:
    rng = np.random.default_rng(length)
    images = rng.integers(0, 256, (length, 8, 8, 3), dtype=np.uint8)
    states = rng.normal(size=(length, 8)).astype(np.float32)
    observations = [
        RobotObservation({"observation.images.image": image}, state, TASK)
        for image, state in zip(images, states, strict=True)
    ]
    return Demonstration([(each, each.state[:7]) for each in observations], outcome)


def test_journal_keeps_only_the_outcome_of_failures(tmp_path: Path) -> None:
    journal, (first, second) = DemonstrationJournal(tmp_path / "episodes"), jobs_of(plan())
    good, bad = DemonstrationOutcome(True, 5, "done", 0), DemonstrationOutcome(False, 7, "failed", 3)
    success = shown(5, good)
    assert not journal.has(first)
    journal.write(first, success)
    journal.write(second, shown(7, bad))
    assert journal.outcome(first) == good and journal.outcome(second) == bad
    frames = journal.frames(first)
    assert {name: array.shape for name, array in frames.items()} == {
        "observation.images.image": (5, 8, 8, 3),
        "observation.state": (5, 8),
        "action": (5, 7),
    }
    assert np.array_equal(frames["observation.images.image"][3], success.steps[3][0].images["observation.images.image"])
    assert journal.frames(second) == {}
    preview = Preview(TASK, [frames["observation.images.image"]], "videos/first.mp4")
    page = demonstrations_report({first: good, second: bad}, [preview], settings().model_dump(mode="json"))
    assert (page.figures["episodes"], page.figures["goal not reached"], page.figures["frames"]) == ("1", "1", "5")
    assert page.tables[0].rows == [[f"0: {TASK}", "2", "1", "5 to 5", "3"]]
    assert page.links == {f"Video: {TASK}": "videos/first.mp4"}
