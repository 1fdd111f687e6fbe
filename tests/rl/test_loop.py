"""The order of a step's units in the loop, and the age of the weights that sample rollouts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from armature.components.artifacts.json_lines import History
from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.stages import Artifact
from armature.components.rl.loop import LoopPlan, run_loop


class RecordingSteps:
    """Units of work for `run_loop` that only take time.

    They record when each unit begins and ends, and which version of the weights the servers have meanwhile.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        rollouts_s: float = 0.01,
        train_s: float = 0.03,
        evaluated: tuple[int, ...] = (),
        ends_at: int | None = None,
        stops_after: int | None = None,
    ) -> None:
        self.version, self.fail_at = 0, fail_at
        self.evaluated, self.ends_at, self.stops_after = evaluated, ends_at, stops_after
        self.evaluated_with: dict[int, int] = {}
        self.rollouts_s, self.train_s = rollouts_s, train_s
        self.notes: list[str] = []
        self.sampled_with: dict[int, int] = {}
        self.sampled_until: dict[int, int] = {}
        self.saved: dict[int, set[int]] = {}
        self.recorded: dict[int, dict[str, float]] = {}
        self._lock = threading.Lock()

    def _note(self, text: str) -> None:
        with self._lock:
            self.notes.append(text)

    def rollouts(self, step: int) -> Artifact:
        self._note(f"rollouts {step} begin")
        self.sampled_with[step] = self.version
        time.sleep(self.rollouts_s)
        self.sampled_until[step] = self.version
        self._note(f"rollouts {step} end")
        return Artifact(kind="rollouts", path=Path(str(step)), digest=str(step))

    def wait_for_rollouts(self, step: int) -> None:
        self._note(f"rollouts {step} awaited")

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        assert rollouts.digest == str(step)
        return Artifact(kind="batches", path=Path(str(step)), digest=f"b{step}")

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        assert batch.digest == f"b{step}"
        self._note(f"train {step} begin")
        time.sleep(self.train_s)
        if step == self.fail_at:
            raise RuntimeError("the step failed")
        self._note(f"train {step} end")
        return {"loss": float(step)}

    def save(self, step: int) -> None:
        self.saved[step] = set(self.sampled_until)

    def sync(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version

    def evaluates(self, step: int) -> bool:
        return step in self.evaluated

    def evaluate(self, step: int) -> bool:
        self._note(f"evaluation {step} begin")
        self.evaluated_with[step] = self.version
        time.sleep(0.02)
        self._note(f"evaluation {step} end")
        return step == self.ends_at

    def stopped(self) -> bool:
        return max(self.recorded) == self.stops_after

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self.recorded[step] = metrics
        return metrics


def run(steps: RecordingSteps, staleness: int, first: int = 1, last: int = 5, in_flight: bool = False) -> int:
    plan = LoopPlan(last, 1, staleness, in_flight)
    return run_loop(steps, first, plan, ThreadUnits(), TerminalEvents())


def test_on_policy_rollouts_use_weights_of_previous_step():
    steps = RecordingSteps()
    run(steps, staleness=0)
    assert steps.sampled_with == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    assert [steps.recorded[step]["loss"] for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_rejects_trainer_metric_with_name_of_loop_metric():
    class TimingSteps(RecordingSteps):
        def train(self, step: int, batch: Artifact) -> dict[str, float]:
            return super().train(step, batch) | {"timing/train": 2.0}

    with pytest.raises(ValueError):
        run(TimingSteps(), staleness=0)


def test_overlapped_rollouts_are_one_version_older():
    steps = RecordingSteps()
    run(steps, staleness=1)
    assert steps.sampled_with == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    for step in range(1, 5):
        assert steps.notes.index(f"rollouts {step + 1} begin") < steps.notes.index(f"train {step} end")


@pytest.mark.parametrize("rollouts_s", [0.0, 0.01, 0.05])
def test_overlapped_rollouts_use_same_version_at_any_speed(rollouts_s):
    steps = RecordingSteps(rollouts_s=rollouts_s, train_s=0.01)
    run(steps, staleness=1)
    assert steps.sampled_with == steps.sampled_until == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    # A run that resumes from a checkpoint would sample missing rollouts with newer weights, so none may be missing.
    assert all({*range(1, step + 2)} - {6} <= made for step, made in steps.saved.items())


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize(("rollouts_s", "train_s"), [(0.05, 0.01), (0.01, 0.05), (0.03, 0.03)])
def test_in_flight_rollouts_start_at_largest_staleness(staleness, rollouts_s, train_s):
    steps = RecordingSteps(rollouts_s=rollouts_s, train_s=train_s)
    assert run(steps, staleness, last=8, in_flight=True) == 8
    assert steps.sampled_with == {step: max(0, step - 1 - staleness) for step in range(1, 9)}
    assert all(steps.sampled_until[step] <= step - 1 for step in range(1, 9))
    assert steps.notes.index(f"rollouts {1 + staleness} begin") < steps.notes.index("train 1 begin")
    assert [steps.notes.count(f"rollouts {step} begin") for step in range(1, 9)] == [1] * 8


@pytest.mark.parametrize(("staleness", "in_flight"), [(0, False), (1, False), (2, True)])
def test_loop_waits_for_rollouts_only_when_idle(staleness, in_flight):
    steps = RecordingSteps()
    run(steps, staleness, in_flight=in_flight)
    for step in range(1, 6):
        awaited = steps.notes.index(f"rollouts {step} awaited")
        assert awaited < steps.notes.index(f"train {step} begin")
        if step > 1:  # the trainer was busy until then
            assert steps.notes.index(f"train {step - 1} end") < awaited


def test_in_flight_sync_does_not_wait_for_rollouts():
    steps = RecordingSteps(train_s=0.01)
    began, first = threading.Event(), steps.rollouts

    def slow(step: int) -> Artifact:
        if step == 3:  # until the weights of step 2 are synced
            assert began.wait(10)
        return first(step)

    def sync(version: int) -> None:
        RecordingSteps.sync(steps, version)
        if version == 2:
            began.set()

    steps.rollouts, steps.sync = slow, sync  # type: ignore[method-assign]
    run(steps, 2, last=4, in_flight=True)
    assert steps.sampled_until[3] == 2


@pytest.mark.parametrize(("staleness", "in_flight"), [(1, True), (3, True)])
def test_early_end_waits_for_running_rollouts(staleness, in_flight):
    steps = RecordingSteps(evaluated=(2,), ends_at=2, rollouts_s=0.1)
    assert run(steps, staleness, last=9, in_flight=in_flight) == 2
    assert max(steps.sampled_with) == 3 + staleness and steps.sampled_with.keys() == steps.sampled_until.keys()


@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluation_uses_weights_of_its_step_alone(staleness):
    plain, steps = RecordingSteps(), RecordingSteps(evaluated=(2, 4))
    assert run(plain, staleness) == run(steps, staleness) == 5
    assert steps.evaluated_with == {2: 2, 4: 4}
    assert steps.sampled_with == plain.sampled_with
    begin, end = (steps.notes.index(f"evaluation 2 {when}") for when in ("begin", "end"))
    assert end == begin + 1
    assert begin > steps.notes.index("train 2 end")
    following = steps.notes[end + 1 :]
    assert f"rollouts {3 + staleness} begin" in following
    assert steps.notes.count("rollouts 5 begin") == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_checkpoint_has_a_time_of_its_own(staleness):
    class Saving(RecordingSteps):
        def save(self, step: int) -> None:
            time.sleep(0.1 * (step == 2))

    steps = Saving()
    run(steps, staleness, last=3)
    times = [steps.recorded[step] for step in (1, 2, 3)]
    assert [row["timing/save"] >= 0.1 for row in times] == [False, True, False]
    assert all(row["timing/sync"] < 0.1 for row in times)
    assert all(sum(row.values()) == pytest.approx(2 * row["timing/step"] + row["loss"]) for row in times)


@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluation_can_end_training(staleness):
    steps = RecordingSteps(evaluated=(2, 4), ends_at=4)
    assert run(steps, staleness) == 4
    assert sorted(steps.recorded) == [1, 2, 3, 4] and max(steps.sampled_with) == 4 + staleness


@pytest.mark.parametrize(("staleness", "in_flight"), [(0, False), (1, False), (1, True)])
def test_stop_request_ends_training_after_the_step(staleness, in_flight):
    steps = RecordingSteps(stops_after=2, rollouts_s=0.02)
    assert run(steps, staleness, in_flight=in_flight) == 2
    assert sorted(steps.recorded) == [1, 2] and steps.sampled_with.keys() == steps.sampled_until.keys()


def test_loop_starts_at_first_step():
    steps = RecordingSteps()
    steps.version = 3
    run(steps, staleness=0, first=4)
    assert sorted(steps.recorded) == [4, 5]
    assert run(finished := RecordingSteps(), staleness=0, first=6) == 5
    assert finished.notes == []


def test_failing_unit_stops_loop():
    steps = RecordingSteps(fail_at=2)
    with pytest.raises(RuntimeError):
        run(steps, staleness=1)
    assert sorted(steps.recorded) == [1]


def test_history_ignores_cut_line_and_keeps_last_row_of_step(tmp_path):
    history = History(tmp_path / "history.jsonl")
    assert history.read() == []
    history.append(1, {"loss": 1.0})
    history.append(2, {"loss": 2.0})
    history.append(2, {"loss": 2.5})
    with history.path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert history.read() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.5}]
    history.append(3, {"loss": 3.0})
    assert history.read()[1:] == [{"step": 2, "loss": 2.5}, {"step": 3, "loss": 3.0}]


@pytest.mark.parametrize("cut", [b"", b"{", b'{"step": 3, "loss": 1' + b" " * 10_000])
def test_history_appends_without_reading_earlier_lines(tmp_path, cut):
    history = History(tmp_path / "history.jsonl")
    before = b'{"step": 1}\n' * 100_000
    history.path.write_bytes(before + cut)
    began = reads()
    history.append(2, {"loss": 2.0})
    assert reads() - began < len(cut) + 20_000
    assert history.path.read_bytes() == before + b'{"step":2,"loss":2.0}\n'


def reads() -> int:
    """Return the number of bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
