"""The bridge against verifiers 0.4, which has tasksets, harnesses and traces."""

from __future__ import annotations

import pytest

from armature.components.contracts.episodes import Observation
from armature.components.contracts.errors import ConfigurationError

from .bridge import color_of, environment, run


def test_taskset_is_played_through_its_harness():
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    for task in list(bridge.tasks("train"))[:3]:
        shown: list[Observation] = []

        def look(turn: int, observation: Observation, shown: list[Observation] = shown) -> str:
            shown.append(observation)
            return color_of(shown[0])

        observations, parts, done = run(bridge, task, look)
        assert done and [observation.content[-1] for observation in observations][1:] == ["Sure? 0"]
        assert parts == {"reward": 2.0, "correct": 1.0, "turns": 2.0}
        assert run(bridge, task, lambda *_: "mauve")[1] == {"reward": 0.0, "correct": 0.0, "turns": 2.0}


def test_empty_answer_is_scored_by_a_taskset():
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    _, parts, done = run(bridge, next(iter(bridge.tasks("train"))), lambda *_: "")
    assert done and parts == {"reward": 0.0, "correct": 0.0, "turns": 2.0}


def test_taskset_tasks_are_split():
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    rows = [task.payload["row"] for split in ("train", "heldout") for task in bridge.tasks(split)]  # type: ignore[arg-type]
    assert len(rows) == 9 == len(set(rows))


def test_legacy_interface_needs_an_earlier_release():
    with pytest.raises(ConfigurationError) as caught:
        environment("sample-colors")
    assert 'interface = "v1"' in caught.exconly()
