from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from armature.components.contracts.robots import RobotObservation
from armature.components.evaluation.libero.episode import PlayedEpisode
from armature.components.evaluation.libero.journal import EpisodeOutcome, EvaluationJournal
from armature.components.evaluation.libero.run import Evaluation
from armature.components.evaluation.libero.schedule import plan_episodes
from armature.components.evaluation.libero.videos import chosen, differs, film, side_by_side, write_video
from tests.evaluation.libero.playground import TASKS, Homing, Plane, settings


def test_first_successes_and_failures_are_filmed_as_they_were_played(tmp_path: Path) -> None:
    plan = settings()
    planned = plan_episodes(plan, {"libero_spatial": TASKS})
    journal = EvaluationJournal(tmp_path / "episodes.jsonl")
    outcomes = Evaluation(plan, planned, journal, lambda finished, latest: None).run(Homing(), [Plane()])
    picked = chosen(planned, outcomes, 1)
    for task in TASKS:
        of_task = [each for each in planned if each.task == task]
        firsts = [next((e for e in of_task if outcomes[e.key].success is end), None) for end in (True, False)]
        assert {e.key for e in firsts if e} == {each.key for each in picked if each.task == task}
    plane = Plane(deaths=(2,))
    filmed = list(film(picked, outcomes, plane, attempts=2))
    assert [differs(played, outcomes[episode.key]) for episode, played in filmed] == [None] * len(picked)
    assert all(len(played.frames) == played.steps + 1 for _, played in filmed)
    assert chosen(planned, outcomes, 0) == []


def test_another_ending_is_said() -> None:
    actions = np.zeros((4, 7), np.float32)
    last = RobotObservation({}, np.zeros(8, np.float32), "")
    assert differs(PlayedEpisode(False, actions, last), EpisodeOutcome(True, actions, None, 0, 0.0)) == (
        "played again, it ended with success False after 4 steps; before, with success True after 4"
    )


def test_videos_hold_every_moment_with_all_cameras(tmp_path: Path) -> None:
    episode = plan_episodes(settings(), {"libero_spatial": TASKS})[8]
    moments = [
        {"a": np.full((33, 32, 3), 8 * k, np.uint8), "b": np.full((33, 32, 3), 255 - 8 * k, np.uint8)}
        for k in range(30)
    ]
    path = write_video(tmp_path, episode, moments, fps=20)
    assert path == "videos/libero_spatial_1/eval_episode_1.mp4"
    with av.open(str(tmp_path / path)) as container:
        assert container.streams.video[0].average_rate == 20
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 30
    for image, moment in zip(frames, moments, strict=True):
        expected = side_by_side(moment)
        assert image.shape == expected.shape == (32, 64, 3)
        assert np.abs(image.astype(int) - expected).mean() < 4
