"""Generalized advantages, the value loss and a step of PPO, compared with their formulas in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.errors import DataError
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    LoadedPolicy,
    fill_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.rl.batch import build_batch
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.learner import RobotRLLearner, value_loss
from armature.components.robots.rl.loader import ActionChunkLoader
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import GAE
from armature.components.robots.rl.table import (
    ActionChunk,
    ActionChunkSample,
    read_batch,
    with_advantage,
    write_batch,
    write_rollouts,
)
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.robots.rl.test_batch import answers as made
from tests.robots.rl.test_learner import learner


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """Return a policy whose value head does not predict zero."""
    policy = calm_policy(tmp_path_factory.mktemp("policy"))
    torch.nn.init.normal_(policy.model.add_value_head(0).layers[-1].weight, generator=torch.Generator().manual_seed(1))
    return policy


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("images"))


def play(loaded: LoadedPolicy, images: ImageStore, processes: Sequence[Kitchen], **changes: Any) -> list[ActionChunk]:
    settings = rollout_settings(**changes)
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)
    collector = Collector(settings, policy, processes, images, lambda done, total: None)
    return collector.collect(plan_step(settings, TASKS, 1), 1, 0, bootstrap=True).answers


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()])


def ppo_learner(loaded: LoadedPolicy, images: ImageStore, gae: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return a learner whose value head has the weights of the one in `loaded`."""
    trainer = learner(loaded, images, advantage={"name": "gae"} | (gae or {}), **changes)
    assert trainer.model.value_head is not None and loaded.model.value_head is not None
    trainer.model.value_head.load_state_dict(loaded.model.value_head.state_dict())
    return trainer


def values_of(trainer: RobotRLLearner, samples: Sequence[ActionChunkSample]) -> np.ndarray:
    """Return the predicted value of each chunk. Each chunk is computed alone, as when rows are sampled on a CPU."""
    assert trainer.model.value_head is not None
    with torch.no_grad():
        states = [trainer.likelihood.predict(trainer.model, trainer._load([each]))[0].states for each in samples]
        return np.array([float(trainer.model.value_head(each)) for each in states])


def valued(answers: Sequence[ActionChunk], values: Sequence[float], last_values: Sequence[float]) -> list[ActionChunk]:
    return [
        replace(*each[:1], value=each[1], last_value=each[2]) for each in zip(answers, values, last_values, strict=True)
    ]


def test_gae_equals_hand_computation() -> None:
    played = valued(made("a", (2, 1.0), (2, 0.0)), [0.5, 0.25, 0.2, 0.4], [0, 0, 0, 0.8])
    built = build_batch(played, GAE(name="gae", gamma=0.9, gae_lambda=0.8))
    solved = 1.0 - 0.25  # terminated: nothing follows
    cut_off = 0.0 + 0.9 * 0.8 - 0.4  # truncated: goes on with 0.8
    raw = np.array(
        [0.9 * 0.25 - 0.5 + 0.9 * 0.8 * solved, solved, 0.9 * 0.4 - 0.2 + 0.9 * 0.8 * cut_off, cut_off], np.float64
    )
    expected = (raw - raw.mean()) / (np.sqrt(((raw - raw.mean()) ** 2).mean()) + 1e-4)
    returns = raw + np.array([0.5, 0.25, 0.2, 0.4])
    assert [each.advantage for each in built.samples] == pytest.approx(expected.tolist(), rel=1e-12)
    assert [each.value_target for each in built.samples] == pytest.approx(returns.tolist(), rel=1e-12)
    assert built.drops == {} and built.metrics["answers/trained"] == 4
    assert built.metrics["return/mean"] == pytest.approx(returns.mean())
    assert built.metrics["value/explained_variance"] == pytest.approx(1 - raw.var() / returns.var())
    with refused("value_missing", "a-0, chunk 0"):
        build_batch(made("a", (1, 1.0)), GAE(name="gae"))


def test_gae_with_lambda_one_gives_discounted_returns() -> None:
    played = valued(made("a", (3, 1.0), (2, 0.0)), [0.3, 9.0, -4.0, 0.1, 0.2], [0, 0, 0, 0, 0.5])
    built = build_batch(played, GAE(name="gae", gamma=0.9, gae_lambda=1.0))
    expected = [0.81, 0.9, 1.0, 0.5 * 0.81, 0.5 * 0.9]
    assert [each.value_target for each in built.samples] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_value_loss_equals_hand_computation(clip: float) -> None:
    rng = np.random.default_rng(3)
    values, before, targets = rng.normal(0, 1, (3, 40))
    tensors = [torch.tensor(each) for each in (values, before, targets)]
    losses, clipped = value_loss(*tensors, GAE(name="gae", value_clip=clip, huber_delta=0.7))

    def huber(error: float) -> float:
        return 0.5 * error**2 if abs(error) <= 0.7 else 0.7 * (abs(error) - 0.35)

    for v, old, target, loss, cut in zip(values, before, targets, losses.tolist(), clipped.tolist(), strict=True):
        plain = huber(v - target)
        near = old + min(max(v - old, -0.2), 0.2) if clip else v
        assert loss == pytest.approx(max(plain, huber(near - target)), rel=1e-12)
        assert cut == (huber(near - target) > plain)
    assert bool(clipped.any()) == (clip > 0) and not bool(clipped.all())


def test_stored_values_do_not_depend_on_batch_or_processes(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk], tmp_path: Path
) -> None:
    others = [(8, [Kitchen()]), (4, [Kitchen(), Kitchen((5,)), Kitchen((3, 4)), Kitchen()])]
    tables = []
    for number, played in enumerate([answers, *(play(loaded, images, processes, batch=n) for n, processes in others)]):
        (tmp_path / str(number)).mkdir()
        write_rollouts(tmp_path / str(number), played)
        tables.append((tmp_path / str(number) / "rollouts.parquet").read_bytes())
    assert tables[0] == tables[1] == tables[2]
    samples = [with_advantage(each, 0.0) for each in answers]
    stored = [each.value for each in answers]
    assert values_of(ppo_learner(loaded, images), samples).tolist() == stored and len(set(stored)) == len(stored)
    truncated = [each.last_value for each in answers if each.truncated]
    assert len(set(truncated)) == len(truncated) > 1 and 0.0 not in truncated
    assert not any(each.last_value for each in answers if not each.truncated)


@pytest.mark.parametrize("ratio", ["chunk", "dimension"])
def test_ppo_step_equals_hand_computation(
    ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk], tmp_path: Path
) -> None:
    options = {"value_lr": 1e-2, "value_clip": 0.01, "value_loss_coef": 0.7, "huber_delta": 0.3}
    trainer = ppo_learner(loaded, images, options, ratio=ratio, learning_rates={"action_expert": 3e-3})
    write_batch(tmp_path, build_batch(answers, trainer.settings.advantage).samples)
    samples = read_batch(tmp_path)
    first = trainer.step(samples)
    assert first["importance_ratio"] == pytest.approx(1.0, abs=1e-5) and first["value/clipped_fraction"] == 0.0
    with torch.no_grad():
        loaded_each = [trainer._load([each]) for each in samples]
        parts = [
            trainer.likelihood.logprobs(trainer.likelihood.predict(trainer.model, one)[0], one).numpy()
            for one in loaded_each
        ]
    now, then = values_of(trainer, samples), np.array([each.value for each in samples])
    policy, targets = [], np.array([each.value_target for each in samples])
    for each, logprobs in zip(samples, parts, strict=True):
        changes = logprobs - each.logprobs
        for change in [changes.sum()] if ratio == "chunk" else changes:
            r = np.exp(change)
            policy.append(-min(r * each.advantage, np.clip(r, 0.8, 1.2) * each.advantage))

    def huber(errors: np.ndarray) -> np.ndarray:
        sizes = np.abs(errors)
        return np.where(sizes <= 0.3, errors**2 / 2, 0.3 * (sizes - 0.15))

    near = huber(then + np.clip(now - then, -0.01, 0.01) - targets)
    of_values = np.maximum(huber(now - targets), near)
    second = trainer.step(samples)
    assert second["value/loss"] == pytest.approx(of_values.mean(), rel=1e-4)
    assert second["value/clipped_fraction"] == pytest.approx((near > huber(now - targets)).mean())
    assert second["value/clipped_fraction"] > 0 and second["kl"] > 0
    assert second["loss"] == pytest.approx(np.mean(policy) + 0.7 * of_values.mean(), rel=1e-4, abs=1e-5)


def test_micro_batch_size_does_not_change_ppo_and_value_loss_leaves_policy(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = build_batch(answers, GAE(name="gae")).samples
    trainers = [
        ppo_learner(loaded, images, {"value_loss_coef": coef}, micro_batch_size=width)
        for width, coef in ((3, 1.0), (100, 1.0), (100, 50.0))
    ]
    reports = [trainer.step(samples) for trainer in trainers]
    assert ppo_learner(loaded, images, mode="full").step(samples)["value/loss"] == pytest.approx(
        reports[0]["value/loss"]
    )
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-4)
    assert reports[0]["value/loss"] == pytest.approx(reports[1]["value/loss"], rel=1e-5)
    assert reports[2]["grad_norm"] > 2 * reports[1]["grad_norm"]
    experts = [trainer.model.action_expert.state_dict() for trainer in trainers[1:]]
    assert all(torch.equal(value, experts[1][name]) for name, value in experts[0].items())


def test_value_head_learns_the_returns(loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]) -> None:
    trainer = learner(
        loaded,
        images,
        advantage={"name": "gae", "gae_lambda": 1.0, "value_lr": 3e-2, "value_clip": 0.0},
        micro_batch_size=100,
        max_steps=60,
        learning_rates={"action_expert": 1e-12},
    )
    fresh = [replace(each, value=0.0, last_value=0.0) for each in answers]
    samples = build_batch(fresh, trainer.settings.advantage).samples
    assert not values_of(trainer, samples).any()
    assert {each.reward for each in answers} == {0.0, 1.0}
    losses = [trainer.step(samples)["value/loss"] for _ in range(60)]
    spread = float(np.var([each.value_target for each in samples]))
    assert losses[-1] < 0.25 * spread / 2 < losses[0]


@pytest.mark.parametrize("ratio", ["chunk", "dimension"])
def test_kl_term_equals_torch_and_keeps_the_policy_near_its_start(
    ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = build_batch(answers, GAE(name="gae")).samples
    plain, held = (
        ppo_learner(loaded, images, ratio=ratio, kl_coefficient=weight, learning_rates={"action_expert": 3e-3})
        for weight in (0.0, 2.0)
    )
    assert held.step(samples)["kl/start"] == 0.0 and "kl/start" not in plain.step(samples)
    start, now = learner(loaded, images), copy.deepcopy(held)
    expected = []
    for each in samples:
        part = held._load([each])
        with torch.no_grad():
            velocities = [one.likelihood.predict(one.model, part)[0].values.double() for one in (now, start)]
        k, steps = each.flow_step, held.likelihood.plan.steps
        t, x, dimensions = k / steps, part.drawn.before.double(), held._load.processor.action_dimensions
        sigma = 0.5 * np.sqrt((1 - max(k, 1) / steps) / (max(k, 1) / steps))
        normals = []
        for v in velocities:
            noise, action = x - t * v, x + (1 - t) * v
            mean = noise * (1 - t - 1 / steps - sigma**2 / (2 * steps * (1 - t))) + action * (t + 1 / steps)
            normals.append(torch.distributions.Normal(mean[0, : each.executed, :dimensions], sigma / np.sqrt(steps)))
        numbers = torch.distributions.kl_divergence(*normals).flatten()
        expected += [float(numbers.sum())] if ratio == "chunk" else numbers.tolist()
    second, free = held.step(samples), plain.step(samples)
    assert second["kl/start"] == pytest.approx(np.mean(expected), rel=1e-4)
    weight = 2.0 * second["kl/start"]
    assert second["loss"] == pytest.approx(free["loss"] + weight, rel=1e-5)  # no update has been held back yet
    apart = []
    for trainer in (held, plain):
        for _ in range(6):
            trainer.step(samples)
        moved = zip(trainer.model.action_expert.parameters(), start.model.action_expert.parameters(), strict=True)
        apart.append(sum(float((one - other).detach().square().sum()) for one, other in moved))
    assert apart[0] < apart[1]


@pytest.mark.parametrize("name", ["value", "value_target"])
def test_rejects_non_finite_values(
    name: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    load, samples = ActionChunkLoader(loaded.processor(), images), build_batch(answers, GAE(name="gae")).samples
    load.refuse(samples, "here")
    with refused("answer_not_trainable", "here, row 1"):
        load.refuse([samples[0], replace(samples[1], **{name: float("inf")})], "here")


def test_rejects_checkpoint_without_value_head(loaded: LoadedPolicy, tmp_path: Path) -> None:
    changed = copy.deepcopy(loaded.model)
    torch.nn.init.normal_(changed.value_head.layers[0].weight)  # type: ignore[union-attr]
    save_policy(tmp_path / "made", loaded.parts, changed.state_dict())
    model = copy.deepcopy(loaded.model)
    fill_model(model, tmp_path / "made")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in changed.state_dict().items())
    alone = load_model(tmp_path / "made", loaded.parts)
    assert alone.value_head is None and not any("value_head" in name for name in alone.state_dict())
    (tmp_path / "made/value_head.safetensors").unlink()
    with pytest.raises(DataError) as error:
        fill_model(model, tmp_path / "made")
    assert error.value.where == str(tmp_path / "made")


def test_small_value_change_does_not_count_as_clipped() -> None:
    random = torch.Generator().manual_seed(0)
    values, before, targets = torch.randn(3, 500, generator=random)
    loss, clipped = value_loss(values, before, targets, GAE(name="gae", value_clip=20.0, huber_delta=0.7))
    assert not clipped.any()
    assert torch.equal(loss, value_loss(values, before, targets, GAE(name="gae", value_clip=0.0, huber_delta=0.7))[0])
