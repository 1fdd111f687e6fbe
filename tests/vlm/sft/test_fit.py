"""Epochs and restarts of a warm start, with a trainer that only records its batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.artifacts.json_lines import History
from armature.components.configuration.stages import TerminalEvents
from armature.components.contracts.errors import TrainerError
from armature.components.rollouts.batches.table import read_batch
from armature.components.vlm.settings import WarmStartSettings
from armature.components.vlm.sft.fit import AnswerLoss, EpochSampler, fit
from armature.components.vlm.sft.supervised import summary
from tests.builders import make_sample
from tests.refusals import refused
from tests.vlm.sft.test_warm_start import VALUES


class CountingTrainer:
    """A trainer whose weights are the list of batches it was trained on. It dies once in each command of `dies_at`."""

    def __init__(self, *dies_at: int | str) -> None:
        self.weights: list[list[str]] = []
        self.saved: list[list[str]] = []
        self.published: list[list[str]] = []
        self.alive, self._dies_at = True, set(dies_at)

    def _die_at(self, command: int | str) -> None:
        if command in self._dies_at:
            self._dies_at.discard(command)
            self.alive = False
            raise TrainerError("killed")

    def resume(self) -> int:
        self.weights = list(self.saved)
        return len(self.weights)

    def settle(self) -> None:
        self.finished = True

    def restart(self) -> None:
        self.alive, self.weights = True, []

    def step(self, step: int, batch: Path) -> dict[str, float]:
        self._die_at(step)
        assert step == len(self.weights) + 1
        self.weights.append([each.sample_id for each in read_batch(batch)])
        return {"loss": 1 / step, "importance_ratio": 0.5, "mismatch_kl": 7.0}

    def evaluate(self, batch: Path) -> dict[str, float]:
        self._die_at("evaluate")
        assert [each.sample_id for each in read_batch(batch)] == ["h"]
        return {"loss": 1 / (1 + len(self.weights)), "token_accuracy": 0.5}

    def save(self) -> None:
        self._die_at("save")
        self.saved = list(self.weights)

    def publish(self, folder: Path, version: int) -> None:
        self._die_at("publish")
        assert version == len(self.weights)
        self.published = list(self.weights)


PLAN = EpochSampler([make_sample(f"s{index}") for index in range(5)], epochs=3, samples_per_step=2, seed=0)


def run(trainer: CountingTrainer, folder: Path, save_every: int = 2) -> list[dict[str, float]]:
    history = History(folder / "history.jsonl")
    loss = AnswerLoss(trainer, [make_sample("h")])  # type: ignore[arg-type]
    fit(trainer, loss, PLAN, save_every, history, TerminalEvents(), folder / "out")  # type: ignore[arg-type]
    return history.read()


@given(samples=st.integers(1, 30), epochs=st.integers(1, 4), size=st.integers(1, 9), seed=st.integers(0, 9))
def test_each_epoch_uses_each_sample_once(samples, epochs, size, seed):
    plan = EpochSampler([make_sample(str(index)) for index in range(samples)], epochs, size, seed)
    steps = [[each.sample_id for each in plan.of(step)] for step in range(1, plan.steps + 1)]
    assert all(1 <= len(step) <= size for step in steps)
    per_epoch = plan.steps_per_epoch
    for epoch in range(epochs):
        taken = Counter(name for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for name in step)
        assert taken == Counter(str(index) for index in range(samples))


@given(pairs=st.integers(1, 15), size=st.integers(1, 4))
def test_epochs_of_pairs_keep_both_samples_side_by_side(pairs, size):
    plan = EpochSampler([make_sample(str(index)) for index in range(2 * pairs)], 1, size, 0, together=2)
    steps = [[int(each.sample_id) for each in plan.of(step)] for step in range(1, plan.steps + 1)]
    assert all(1 <= len(step) // 2 <= size for step in steps)
    neighbors = [(step[at], step[at + 1]) for step in steps for at in range(0, len(step), 2)]
    assert sorted(neighbors) == [(2 * pair, 2 * pair + 1) for pair in range(pairs)]


@pytest.mark.parametrize(
    "dies_at", [(2, 6), ("evaluate",), ("save", 3), ("publish",), (1, "evaluate", "save", "publish")]
)
def test_fit_after_trainer_deaths_equals_uninterrupted_fit(tmp_path, dies_at):
    straight, killed = CountingTrainer(), CountingTrainer(*dies_at)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert run(straight, tmp_path / "a") == run(killed, tmp_path / "b")
    assert straight.published == killed.published and len(straight.published) == PLAN.steps == 9


def test_resumed_fit_completes_history(tmp_path):
    trainer = CountingTrainer(5)
    trainer.restart = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(trainer, tmp_path)
    again = CountingTrainer()
    again.saved = trainer.saved
    history = run(again, tmp_path)
    assert [row["step"] for row in history] == list(range(10))
    assert [row["step"] for row in history if "heldout/loss" in row] == [0, 3, 6, 9]
    assert history[0]["heldout/loss"] == 1.0 and history[9]["heldout/loss"] == pytest.approx(0.1)
    assert "mismatch_kl" not in history[1]  # there was no sampler


def test_warm_start_trainer_minimizes_token_cross_entropy():
    settings = WarmStartSettings.model_validate(VALUES)
    trainer = settings.trainer(8)
    assert (trainer.objective.name, trainer.aggregation, trainer.kl_coefficient) == ("likelihood", "token", 0.0)
    assert (trainer.learning_rate, trainer.max_steps) == (settings.learning_rate, 8)
    with refused("warmup_too_long", "warmup_steps = 9", 8):
        WarmStartSettings.model_validate(VALUES | {"warmup_steps": 9}).trainer(8)


def test_summary_leaves_out_steps_without_a_metric() -> None:
    steps = [{"step": step, "loss": 0.5, "probability": 0.25} for step in range(21)]
    del steps[-1]["probability"]
    assert summary(steps) == {"loss": 0.5, "probability": 0.25}  # over steps 19 and 20
    for step in steps:
        step.pop("probability", None)
    assert summary(steps) == {"loss": 0.5}
