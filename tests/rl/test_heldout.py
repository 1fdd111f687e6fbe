"""Evaluations during training: their metrics, the best weights, ending early, and that training is not disturbed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from armature.components.artifacts.json_lines import History
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, fingerprint
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.evaluation.settings import EvaluateStageSettings, HeldoutSetSettings
from armature.components.inference.client import Completion
from armature.components.rl.config import MultimodalRLConfig
from armature.components.rl.evaluations import HeldoutEvaluations, HeldoutSet, best_step
from armature.components.rl.run import RLRun, RunParts
from armature.components.rl.settings import LoopSettings, TrainVLMSettings
from armature.components.rollouts.batches.table import MOST_TOKENS
from tests.refusals import refused
from tests.rl.test_rounds import NotingTrainer, PoolOfOne, Scripted, Tells, Unmerged, context
from tests.rl.test_trainer import LocalSampler, colors_trainer, config, reward, run, samplers
from tests.vlm.conftest import Tiny, make_tiny, tiny

__all__ = ["make_tiny", "samplers", "tiny"]  # fixtures

TASKS, STEPS = 4, 6
COOLER = 0.7
HELDOUT = {"every": 2, "heldout_tasks": TASKS, "sampling": {"max_tokens": 4, "temperature": 0.0}}


class Exam:
    """An environment of numbered tasks. The answer "right" earns the full reward, and "almost" earns half of it."""

    name, system_prompt, dialogue, max_turns = "exam", None, True, 1
    reward_weights = {"right": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.listed = [Task(f"exam/{number}", "heldout", {"number": number}) for number in range(TASKS)]

    def episode(self, task: Task) -> Any:
        class Question:
            async def reset(self) -> Observation:
                return Observation((f"exam {task.payload['number']}",))

            async def step(self, action: str) -> Outcome:
                return Outcome(None, {"right": float(action == "right"), "almost": float(action == "almost")})

            async def close(self) -> None: ...

        return Question()


Exam.reward_weights["almost"] = 0.5


class Examined(Scripted):
    """A policy whose answers to an `Exam` depend on its version. It answers "right" to the first `solved[version]`
    tasks, and "almost" to the others if the version is in `almost`."""

    solved: dict[int, int] = {}  # noqa: RUF012
    almost: tuple[int, ...] = ()
    lost_at: int | None = None

    def __init__(self) -> None:
        super().__init__(0.0)
        self.log: list[tuple[str, int]] = []

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: Any, seed: int) -> Completion:
        (part, *_) = messages[0]["content"]
        kind, _, number = part["text"].partition(" ")
        self.log.append((kind, self.version))
        answer = await super().complete(messages, sampling, seed)
        if kind != "exam":
            return answer
        if self.version == self.lost_at and int(number) == TASKS - 1:
            raise ConnectionError("the server is gone")
        text = "right" if int(number) < self.solved[self.version] else "almost" * (self.version in self.almost)
        return Completion(**{**answer.__dict__, "text": text or "no"})


class ForgettingPool(PoolOfOne):
    def __init__(self, policy: Examined) -> None:
        super().__init__(policy)
        self._log = policy.log

    async def reset_caches(self) -> None:
        self._log.append(("reset", self.weights.version))


class WritingTrainer(NotingTrainer):
    def publish(self, folder: Path, version: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(str(version))

    def settle(self) -> None: ...


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def made_run(folder: Path, portal: BlockingPortal, policy: Examined, **changes: Any) -> RLRun:
    folder.mkdir(exist_ok=True)
    overrides = ("rollouts.groups_per_step=2", "rollouts.group_size=2", f"trainer.max_steps={STEPS}")
    settings = load_recipe("train-vlm/colors", overrides).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    exam = Exam()
    heldout = HeldoutSet(HeldoutSetSettings.model_validate(HELDOUT | changes), exam.listed, cast(Any, exam), {})
    parts = RunParts(
        environment=Tells(),
        tasks=Tells().tasks("train"),
        adapter=Unmerged(),
        tokenizer=None,
        vocabulary=(MOST_TOKENS, MOST_TOKENS),
        servers=cast(Any, ForgettingPool(policy)),
        trainer=cast(Any, WritingTrainer(policy)),
        digests={},
        heldout=heldout,
    )
    run = RLRun(settings.loop, context(folder), ArtifactStore(folder), parts, portal)
    run.preflight = lambda: NoPreflight()  # type: ignore[assignment, method-assign, return-value]
    return run


class NoPreflight:
    def lines(self) -> list[str]:
        return []


def policy_of(solved: Sequence[int], **attributes: Any) -> Examined:
    """Make a policy that solves `solved[i]` tasks with the weights after step 2 * i."""
    policy = Examined()
    policy.solved = {2 * number: count for number, count in enumerate(solved)}
    for name, value in attributes.items():
        setattr(policy, name, value)
    return policy


def test_history_has_accuracy_with_wilson_interval(tmp_path: Path, portal: BlockingPortal) -> None:
    run = made_run(tmp_path, portal, policy_of([0, 1, 3, 2]))
    assert run.train_from(0) == STEPS
    rows = {row["step"]: row for row in run.history.read()}
    assert [step for step, row in rows.items() if "heldout/accuracy" in row] == [0, 2, 4, 6]
    assert rows[0].keys() == {"step", *(f"heldout/{name}" for name in ("accuracy", "reward", "low", "high"))} | {
        "heldout/episodes",
        "heldout/failed",
    }
    assert (rows[4]["heldout/accuracy"], rows[4]["heldout/episodes"]) == (0.75, 4)
    # (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = 3/4, n = 4, z = 1.959964
    assert rows[4]["heldout/low"] == pytest.approx(0.30064, abs=1e-5)
    assert rows[4]["heldout/high"] == pytest.approx(0.95441, abs=1e-5)
    assert (rows[0]["heldout/low"], rows[0]["heldout/high"]) == (0.0, pytest.approx(0.48990, abs=1e-5))
    lineage = {row["step"]: row for row in run.lineage(STEPS)}
    assert [step for step, row in lineage.items() if "evaluation" in row] == [0, 2, 4, 6]
    assert {row["evaluation"] for row in lineage.values() if "evaluation" in row} == {
        one.digest for one in run.store if one.kind == "evaluations"
    }


def test_best_weights_are_published(tmp_path: Path, portal: BlockingPortal) -> None:
    run = made_run(tmp_path, portal, policy_of([2, 3, 3, 1]))
    run.finish(tmp_path / "checkpoint", run.train_from(0))
    assert (tmp_path / "checkpoint/weights").read_text() == "2"  # the first of two that are equal
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-000002"]
    assert run.evaluations is not None
    summary = run.evaluations.summary()
    assert (summary["best/step"], summary["best/accuracy"], summary["evaluations"]) == (2, 0.75, 4)


def test_best_weights_of_another_training_in_the_folder_are_not_taken(tmp_path: Path, portal: BlockingPortal) -> None:
    (tmp_path / "best/step-000000").mkdir(parents=True)
    (tmp_path / "best/step-000000/weights").write_text("other")
    run = made_run(tmp_path, portal, policy_of([3, 2, 2, 1]))
    run.finish(tmp_path / "checkpoint", run.train_from(0))
    assert (tmp_path / "checkpoint/weights").read_text() == "0"


def test_rejects_deleted_best_weights(tmp_path: Path, portal: BlockingPortal) -> None:
    run = made_run(tmp_path, portal, policy_of([2, 3, 3, 1]))
    run.train_from(0)
    shutil.rmtree(tmp_path / "best")
    with refused("best_weights_missing", "step 2", tmp_path / "best", "--force"):
        run.finish(tmp_path / "checkpoint", STEPS)
    with refused("best_weights_missing", "step 2"):
        made_run(tmp_path, portal, policy_of([2, 3, 3, 1])).train_from(4)
    resumed = made_run(tmp_path, portal, policy_of([2, 3, 3, 1]))
    resumed.train_from(2)  # these weights are at hand
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-000002"]


def test_equal_accuracies_are_ranked_by_reward(tmp_path: Path, portal: BlockingPortal) -> None:
    run = made_run(tmp_path, portal, policy_of([0, 0, 0, 0], almost=(4,)))
    run.finish(tmp_path / "checkpoint", run.train_from(0))
    assert (tmp_path / "checkpoint/weights").read_text() == "4"
    assert best_step({0: (0.5, 0.1), 2: (0.5, 0.2), 4: (0.4, 0.9), 6: (0.5, 0.2)}) == 2


@pytest.mark.parametrize(
    ("solved", "patience", "last", "best"),
    [
        ([1, 2, 2, 2], 2, 6, "2"),
        ([1, 0, 0, 4], 2, 4, "0"),  # the fourth evaluation, which would have been the best, is never made
        ([1, 0, 0, 4], 3, 6, "6"),
        ([1, 0, 2, 1], 1, 2, "0"),
        ([0, 0, 0, 0], 0, 6, "0"),
    ],
)
def test_training_ends_when_patience_runs_out(
    tmp_path: Path, portal: BlockingPortal, solved: list[int], patience: int, last: int, best: str
) -> None:
    run = made_run(tmp_path, portal, policy_of(solved), patience=patience)
    assert run.train_from(0) == last
    run.finish(tmp_path / "checkpoint", last)
    assert (tmp_path / "checkpoint/weights").read_text() == best
    assert max(row["step"] for row in run.history.read()) == last == max(row["step"] for row in run.lineage(last))
    again = made_run(tmp_path, portal, policy_of(solved), patience=patience)  # killed before it was finished
    assert again.train_from(last) == last


def test_killed_evaluation_is_repeated_and_counted_once(tmp_path: Path, portal: BlockingPortal) -> None:
    solved = [0, 1, 3, 2]
    whole = made_run(tmp_path / "whole", portal, policy_of(solved))
    whole.train_from(0)
    with pytest.raises(ConnectionError):
        made_run(tmp_path / "cut", portal, policy_of(solved, lost_at=4)).train_from(0)
    policy = policy_of(solved)
    resumed = made_run(tmp_path / "cut", portal, policy)
    assert resumed.evaluations is not None and list(resumed.evaluations.made) == [0, 2]
    resumed.complete_history(4)
    resumed.train_from(4)
    assert [entry for entry in policy.log if entry[0] == "exam"] == [("exam", 4)] * TASKS + [("exam", 6)] * TASKS
    for one, other in zip(resumed.history.read(), whole.history.read(), strict=True):
        same = {key: value for key, value in other.items() if not key.startswith("timing")}
        assert {key: one.get(key) for key in same} == same
    for step, made in whole.evaluations.made.items() if whole.evaluations else ():
        ours = resumed.evaluations.made[step].path / "results.parquet"
        assert ours.read_bytes() == (made.path / "results.parquet").read_bytes()


def test_caches_are_reset_after_evaluation(tmp_path: Path, portal: BlockingPortal) -> None:
    policy = policy_of([0, 1, 2, 3])
    made_run(tmp_path, portal, policy).train_from(0)
    asked = [entry for place, entry in enumerate(policy.log) if place == 0 or policy.log[place - 1] != entry]
    for place, (kind, version) in enumerate(asked):
        if kind == "exam":
            assert asked[place + 1] == ("reset", version)
            assert version == STEPS or asked[place + 2][0] == "first?"


def test_rejects_evaluation_by_other_weights(tmp_path: Path, portal: BlockingPortal) -> None:
    policy = policy_of([0, 1, 2, 3])
    run = made_run(tmp_path, portal, policy)
    policy.version = 7
    policy.solved[7] = 0
    with refused("other_weights_played", "step 0", [7]):
        run.train_from(0)
    assert not list(tmp_path.glob("evaluations/*"))


# --- With a real model ---


HELDOUT_OPTIONS = {"eval_steps": 2, "eval_tasks": 3, "eval_temperature": COOLER}


def trained(tiny: Tiny, folder: Path, **options: Any) -> str:
    """Train three steps and return a digest of the final weights."""
    trainer = colors_trainer(tiny, config(folder, max_steps=3, save_steps=2, **options))
    reward(trainer._examined)
    trainer.train()
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_evaluations_do_not_change_trained_weights(
    tiny: Tiny,
    tmp_path: Path,
    samplers: list[LocalSampler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights also agree after a kill within an evaluation. Here rollouts overlap with training; without overlap see
    tests/examples/test_grpo.py, which has a real server."""
    settings = MultimodalRLConfig.settings

    def ahead(self: MultimodalRLConfig) -> LoopSettings:
        loop = settings(self)
        return loop.model_copy(update={"rollouts": loop.rollouts.model_copy(update={"max_staleness": 1})})

    monkeypatch.setattr(MultimodalRLConfig, "settings", ahead)
    plain = trained(tiny, tmp_path / "plain")
    assert trained(tiny, tmp_path / "evaluated", **HELDOUT_OPTIONS) == plain
    assert samplers[-1].synced == [1, 2, 3]
    assert [row["policy_version/max"] for row in run(tmp_path / "evaluated") if row["step"]] == [0, 0, 1]

    asked, complete = [], LocalSampler.complete

    async def lost(self: LocalSampler, messages: Any, sampling: Any, seed: int) -> Any:
        if sampling.temperature == COOLER:
            asked.append(seed)
            if len(asked) == 5:  # the second of the second evaluation
                raise ConnectionError("the server is gone")
        return await complete(self, messages, sampling, seed)

    monkeypatch.setattr(LocalSampler, "complete", lost)
    with pytest.raises(ConnectionError):
        trained(tiny, tmp_path / "cut", **HELDOUT_OPTIONS)
    assert trained(tiny, tmp_path / "cut", **HELDOUT_OPTIONS) == plain
    assert len(set(asked)) == 3  # the same seeds at every step
    results = [sorted((tmp_path / run / "store/evaluations").glob("*/results.parquet")) for run in ("evaluated", "cut")]
    assert len(results[0]) == 3
    assert [one.read_bytes() for one in results[0]] == [one.read_bytes() for one in results[1]]


# --- Settings ---


def test_final_evaluation_settings_do_not_change_training_fingerprint() -> None:
    def prints(*overrides: str) -> tuple[str, str]:
        recipe = load_recipe("train-vlm/colors", overrides)
        settings = recipe.settings_for(TrainVLMSettings), recipe.settings_for(EvaluateStageSettings)
        assert isinstance(settings[0], TrainVLMSettings)
        return (
            fingerprint(STAGES["train-vlm"], settings[0], {"tasks": NOTHING, "model": NOTHING}),
            settings[1].model_dump_json(),
        )

    plain = prints()
    assert prints("evaluation.max_tasks=7", "evaluation.seed=3")[0] == plain[0]
    assert prints("evaluation.every=5")[0] != plain[0] and prints("evaluation.every=5")[1] == plain[1]
    assert prints("evaluation.every=5", "evaluation.kind_field=")[0] == prints("evaluation.every=5")[0]
    assert prints("evaluation.every=5", "evaluation.seed=3")[0] != prints("evaluation.every=5")[0]


def test_training_fingerprint_covers_the_held_out_environment() -> None:
    def sources(*overrides: str) -> set[str]:
        settings = load_recipe("train-vlm/colors", overrides).settings_for(TrainVLMSettings)
        return set(STAGES["train-vlm"].sources(settings, {}))

    assert sources("evaluation.every=5") == sources() | {f"evaluation/{name}" for name in sources()}


class Nothing:
    digest = "0"


NOTHING: Any = Nothing()


def test_rejects_patience_without_evaluations() -> None:
    with refused("value_error", "patience = 3"):
        load_recipe("train-vlm/colors", ["evaluation.patience=3"])
    with refused("extra_forbidden", "evaluation.every"):
        load_recipe("evaluate/vlm", ["evaluation.every=3"])


def test_resumed_run_keeps_metrics_of_its_first_step(tmp_path: Path) -> None:
    """The process that made the step wrote its metrics, which stay; the evaluation's metrics come from its artifact."""
    history = History(tmp_path / "history.jsonl")
    history.append(2, {"loss": 1.0, "timing/step": 3.0, "timing/cpu": 2.5, "heldout/accuracy": 0.25})
    evaluations = HeldoutEvaluations.__new__(HeldoutEvaluations)
    evaluations.metrics = {2: {"accuracy": 0.5, "reward": 0.5}}
    whole = {"loss": 1.0, "timing/step": 3.0, "timing/cpu": 2.5, "heldout/accuracy": 0.5, "heldout/reward": 0.5}
    assert evaluations.complete(history, 2) == whole
    assert history.read() == [whole | {"step": 2}]
