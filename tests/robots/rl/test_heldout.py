"""Evaluations during training: their metrics and effects, and that training is the same with and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from scipy.stats import binomtest

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, fingerprint
from armature.components.contracts.stages import Artifact
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.results import read_results
from armature.components.robots.evaluation.settings import TrainLiberoEvaluationSettings
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.rl.heldout import judgement
from armature.components.robots.rl.settings import TrainVLARLSettings
from armature.components.robots.rl.stage import write_pages
from armature.components.robots.rl.table import read_rollouts
from tests.refusals import refused
from tests.robots.rl.kitchen import Kitchen, calm_policy
from tests.robots.rl.test_run import rows, settings, train

START = Artifact(kind="policy", path=Path("nowhere"), digest="0")
SPLIT = ("evaluation.initial_states=[0, 1]", "rollouts.initial_states=[10, 11]")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("start")
    calm_policy(folder)
    return Artifact(kind="policy", path=folder, digest="0")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint/model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_heldout_evaluation_has_no_perturbations() -> None:
    plan = {"suites": ["libero_spatial"], "every": 2, "perturbations": {"camera": [1.0]}}
    heldout = TrainLiberoEvaluationSettings.model_validate(plan).heldout_set
    assert heldout is not None and heldout.perturbations.listed() == []


def test_evaluations_do_not_change_training_even_after_a_crash(tmp_path: Path, start: Artifact) -> None:
    plain = train(tmp_path / "plain", start, [Kitchen()], settings())
    whole = train(tmp_path / "whole", start, [Kitchen()], settings(evaluation={"every": 2}))
    assert [row["step"] for row in rows(whole)] == [0, 1, 2, 3]
    assert [row["step"] for row in rows(whole) if "heldout/success" in row] == [0, 2, 3]
    for one, other in zip(rows(whole)[1:], rows(plain), strict=True):
        assert {name: value for name, value in one.items() if not name.startswith("heldout/")} == other
    assert [row["rollouts"] for row in whole.lineage(3) if row["step"]] == [row["rollouts"] for row in plain.lineage(3)]

    class Doomed(Kitchen):
        """A simulator whose process dies in the evaluation after step 2 and cannot be restarted."""

        def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
            journal = tmp_path / "cut/work/robot-evaluations/000002.jsonl"
            if journal.exists() and journal.read_bytes().count(b"\n") >= 3:
                raise WorkerError("the process of the plane died")
            return super().step(actions, slot, film)

    with refused("too_many_episodes_failed"):
        train(tmp_path / "cut", start, [Doomed()], settings(evaluation={"every": 2}))
    journaled = (tmp_path / "cut/work/robot-evaluations/000002.jsonl").read_bytes().count(b"\n")
    process = Kitchen()
    resumed = train(tmp_path / "cut", start, [process], settings(evaluation={"every": 2}))
    assert (
        journaled >= 3 and process.resets == (12 - journaled) + 8 + 12
    )  # the rest of it, step 3, and the last evaluation
    assert rows(resumed) == rows(whole) and resumed.lineage(3) == whole.lineage(3)
    assert equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_evaluation_metrics_match_tables_and_best_weights_are_published(tmp_path: Path, start: Artifact) -> None:
    run = train(tmp_path, start, [Kitchen()], settings(evaluation={}))
    assert run.evaluations is not None
    results = {step: read_results(made.path) for step, made in run.evaluations.made.items()}
    assert list(results) == [0, 1, 2, 3]
    ends = {step: [each.success for each in played] for step, played in results.items()}
    assert {len(each) for each in ends.values()} == {12} and {each.initial_state for each in results[0]} == {1, 2, 4}
    history = {row["step"]: row for row in run.history.read()}
    for step, solved in ends.items():
        row = history[step]
        assert row["heldout/success"] == sum(solved) / 12
        assert row["heldout/low"] < row["heldout/success"] < row["heldout/high"] or sum(solved) in (0, 12)
        assert row["heldout/steps"] == pytest.approx(np.mean([each.steps for each in results[step]]))
        if step:
            gained = sum(now and not then for then, now in zip(ends[0], solved, strict=True))
            lost = sum(then and not now for then, now in zip(ends[0], solved, strict=True))
            expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
            assert (row["heldout/gained"], row["heldout/lost"]) == (gained, lost)
            assert row["heldout/p_value"] == pytest.approx(expected)
    best = max(range(4), key=lambda step: (sum(ends[step]), -history[step]["heldout/steps"]))
    summary = run.evaluations.summary()
    assert summary["best/step"] == best and summary["best/success"] == sum(ends[best]) / 12
    published = tmp_path / "work/weights/000003" if best == 3 else tmp_path / f"work/best/step-{best:06d}"
    assert equal(weights(tmp_path), load_file(published / "model.safetensors"))
    assert [row.get("evaluation") for row in run.lineage(3)] == [run.evaluations.made[step].digest for step in range(4)]
    newest = read_rollouts(run.rollouts(3).path)
    write_pages(tmp_path, settings(evaluation={}), run.history.read(), newest, summary)
    page = (tmp_path / "report.html").read_text()
    assert "best held-out success" in page and "Held-out success" in page


def test_evaluation_is_deterministic_and_draws_no_random_numbers(tmp_path: Path, start: Artifact) -> None:
    """With negligible learning rates every evaluation equals the first one."""
    still = settings(evaluation={"patience": 2}, learning_rates={"action_expert": 1e-30}, max_steps=3)
    run = train(tmp_path, start, [Kitchen(), Kitchen()], still)
    assert run.evaluations is not None
    assert list(run.evaluations.made) == [0, 1, 2]  # patience ends it
    tables = {(made.path / "results.parquet").read_bytes() for made in run.evaluations.made.values()}
    assert len(tables) == 1 and run.evaluations.best == 0
    assert [row["step"] for row in run.lineage(2)] == [0, 1, 2]
    assert run.history.read()[-1]["heldout/p_value"] == 1.0


@pytest.mark.parametrize(
    ("gained", "lost", "sentence"),
    [(9, 1, "p = 0.021: the policy is learning"), (1, 9, "become worse"), (3, 0, "p = 0.25: no significant")],
)
def test_judgement_follows_the_sign_test(gained: int, lost: int, sentence: str) -> None:
    assert sentence in judgement(gained, lost, binomtest(gained, gained + lost).pvalue)


def recipe_settings(*overrides: str) -> TrainVLARLSettings:
    settings = load_recipe("train-vla-rl/tiny", overrides).settings_for(TrainVLARLSettings)
    assert isinstance(settings, TrainVLARLSettings)
    return settings


def test_final_evaluation_settings_do_not_change_the_fingerprint() -> None:
    def printed(*overrides: str) -> str:
        return fingerprint(STAGES["train-vla-rl"], recipe_settings(*overrides), {"policy": START})

    assert recipe_settings().evaluation is None
    assert printed() == printed("evaluation.videos_per_task=0", "evaluation.episodes_per_task=3")
    every = "evaluation.every=5"
    assert printed() != printed(every) != printed(every, "evaluation.heldout_episodes=7")
    assert printed(every) == printed(every, "evaluation.videos_per_task=0", "evaluation.episodes_per_task=3")


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (("evaluation.initial_states=[10, 3]",), "evaluation.initial_states: "),
        (("evaluation.initial_states=[]", "evaluation.every=2"), "evaluation.initial_states, rollouts.initial_states"),
        (("rollouts.initial_states=[]",), "evaluation.initial_states, rollouts.initial_states"),
        (("evaluation.patience=2",), "patience = 2"),
        (("evaluation.every=2", "rollouts.torch_compile=true"), "evaluation.torch_compile, rollouts.torch_compile"),
    ],
)
def test_rejects_evaluation_on_training_states(overrides: tuple[str, ...], place: str) -> None:
    with refused("value_error", place):
        recipe_settings(*overrides)


def test_accepts_same_states_of_other_tasks_or_suites() -> None:
    recipe: Any = load_recipe("train-vla-rl/tiny", ["evaluation.initial_states=[10]", "evaluation.tasks=[1]"])
    assert recipe.sections["evaluation"].initial_states == (10,)
