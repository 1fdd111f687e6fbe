"""Reward-weighted regression: the weights of chunks, and that training with them equals weighted imitation."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import cos, exp, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import Artifact
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan, LossPlan
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.molmoact2.processing.batch import collate
from armature.components.robots.rl.batch import build_batch
from armature.components.robots.rl.chunk_learner import Update
from armature.components.robots.rl.loader import ActionChunkLoader
from armature.components.robots.rl.reward_weighted import RewardWeightedLearner, draw_seed
from armature.components.robots.rl.schedule import answer_seed, plan_step
from armature.components.robots.rl.settings import RewardWeighted, RobotRLTrainerSettings, TrainVLARLSettings
from armature.components.robots.rl.table import (
    ActionChunk,
    ActionChunkSample,
    read_batch,
    read_rollouts,
    with_advantage,
)
from armature.components.training.engine import AppliedUpdate
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.robots.rl.test_batch import answers as made
from tests.robots.rl.test_learner import play
from tests.robots.rl.test_run import rows, settings, train

FLOW_TIMESTEPS = 3
FILTER = RewardWeighted(name="reward_weighted")


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()], likelihood="none", group_size=1, groups_per_step=4)


def learner(loaded: LoadedPolicy, images: ImageStore, **changes: Any) -> RewardWeightedLearner:
    model = copy.deepcopy(loaded.model)
    values = {"max_steps": 2, "micro_batch_size": 3, "objective": {"name": "reward_weighted", "warmup_updates": 2}}
    chosen = RobotRLTrainerSettings.model_validate(values | changes)
    prepare(model, chosen, loaded.settings.semantics)
    plan = InferencePlan.of(loaded.settings, loaded.config)
    load = ActionChunkLoader(loaded.processor(), images, imitated=True)
    return RewardWeightedLearner(model, chosen, plan, FLOW_TIMESTEPS, load)


def test_weights_equal_hand_computation() -> None:
    played = [*made("a", (2, 1.0), (3, 0.0)), *made("b", (1, 1.0)), *made("c", (2, 0.25))]
    built = build_batch(played, FILTER)
    assert [each.episode_id for each in built.samples] == ["a-0", "a-0", "b-0", "c-0", "c-0"]
    assert {each.advantage for each in built.samples} == {1.0}
    assert built.drops == {"unsolved_episode": 3} and built.metrics["answers/trained"] == 5
    assert built.metrics["rollouts/planned"] == 4 and "groups/zero_advantage_fraction" not in built.metrics
    soft = build_batch(played, RewardWeighted(name="reward_weighted", beta=0.5))
    expected = [1.0] * 2 + [exp(-2.0)] * 3 + [1.0] + [exp(-1.5)] * 2
    assert [each.advantage for each in soft.samples] == pytest.approx(expected, rel=1e-12) and not soft.drops
    again = build_batch(made("d", (2, 0.0)), FILTER, earlier=played)
    assert [each.episode_id for each in again.samples] == [each.episode_id for each in built.samples]
    assert again.drops == {"unsolved_episode": 2} and again.metrics["answers/replayed"] == 5
    assert again.metrics["success"] == 0.0 and again.metrics["answers/per_episode"] == 2


def test_tiny_beta_imitates_the_best_unsolved_episodes() -> None:
    """exp((R - 1) / beta) would be 0 for all episodes; exp(-200), of the worst one, is 0 in the batch's float32."""
    played = [*made("a", (2, 0.0), (3, 0.002)), *made("b", (1, 0.0019))]
    sharp = build_batch(played, RewardWeighted(name="reward_weighted", beta=1e-5))
    assert [(each.episode_id, each.advantage) for each in sharp.samples] == [
        *[("a-1", 1.0)] * 3,
        ("b-0", pytest.approx(exp(-10.0), rel=1e-9)),
    ]
    assert sharp.drops == {"weightless_episode": 2} and sharp.metrics["answers/trained"] == 4
    replayed = build_batch(made("c", (2, 0.001)), RewardWeighted(name="reward_weighted", beta=1e-5), earlier=played)
    assert replayed.drops == {"weightless_episode": 2} and replayed.metrics["answers/replayed"] == 4


def test_rollouts_equal_evaluation_actions(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    plan = rollout_settings(likelihood="none", group_size=1, groups_per_step=4)
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)
    groups = plan_step(plan, TASKS, 1)
    for each in answers:
        planned = next(one for (one,) in groups if f"00001-{one.repetition:06d}" == each.group_id)
        shown = {name: np.asarray(images.open(ref)) for name, ref in zip(each.cameras, each.images, strict=True)}
        seen = RobotObservation(shown, each.state, each.language)
        (expected,) = policy.predict([seen], [answer_seed(plan, 1, planned, each.chunk)])
        assert np.array_equal(each.actions, expected[: each.executed].reshape(-1))
        assert each.flow_step is None and not (len(each.before) or len(each.after) or len(each.logprobs))


def weighed(answers: list[ActionChunk]) -> list[ActionChunkSample]:
    return [with_advantage(each, 1.0 / (2 + number)) for number, each in enumerate(answers)]


def test_gradient_equals_weighted_imitation(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    """Compares with the model's training loss of each chunk alone, from actions in the dataset's units."""
    samples, trainer = weighed(answers), learner(loaded, images)
    update = Update(2, 5, 9, samples, frozenset(), mean_advantage=0.3)  # other updates have other weights
    parameters = [each for each in trainer.model.action_expert.parameters() if each.requires_grad]
    gradients = [torch.zeros_like(each) for each in parameters]
    for first in range(0, len(samples), 3):  # in micro-batches, which add up
        part = samples[first : first + 3]
        loss, _ = trainer._losses(part, trainer._load(part), update)
        gradients = [a + b for a, b in zip(gradients, torch.autograd.grad(loss, parameters), strict=True)]
    plan, processor, total = LossPlan.of(loaded.settings), loaded.processor(), torch.zeros(())
    plan = replace(plan, action_mode="continuous", bidirectional_images=trainer._plan.bidirectional_images)
    for each in samples:
        shown = {name: np.asarray(images.open(ref)) for name, ref in zip(each.cameras, each.images, strict=True)}
        chunk = each.actions.reshape(each.executed, -1)
        chunk = np.concatenate([chunk, np.repeat(chunk[-1:], processor.chunk - each.executed, axis=0)])
        example = processor.encode(RobotObservation(shown, each.state, each.language), chunk)
        answered = example.labels is not None
        example = replace(example, labels=None, horizon_padding=None)
        if answered:
            prompt = processor.encode(RobotObservation(shown, each.state, each.language))
            example = replace(example, input_ids=prompt.input_ids, image_tokens=prompt.image_tokens)
        batch = collate([example], "left", 1, processor.vocabulary.pad)
        seed, config = draw_seed(trainer.settings.seed, update, each), loaded.config
        draws = FlowSamples.per_example([seed], FLOW_TIMESTEPS, processor.horizon, config)
        if each.executed == processor.chunk:
            error = trainer.model(batch, draws, plan).flow
        else:  # only what was carried out counts, while the whole chunk is seen
            used, noise = ~batch.dimension_padding[0], draws.noise[0] * ~batch.dimension_padding[0]
            t = draws.times[0][:, None, None]
            points = (1 - t) * noise + t * batch.actions[0] if plan.mask_dimensions else None
            assert points is not None
            velocity = trainer.model.velocities(batch, points[None], draws.times, plan)[0][0][0]
            wrong = (velocity - (batch.actions[0] - noise))[:, : each.executed, used].square()
            error = wrong.sum() / (FLOW_TIMESTEPS * processor.chunk * used.sum())
        total = total + each.advantage * error
    total = total / (0.3 * len(samples))
    for one, other in zip(gradients, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_learning_rates_warm_up_each_step_and_decay_over_the_run(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    rates = {"action_expert": 2e-3}
    trainer = learner(loaded, images, learning_rates=rates, samples_per_update=4, epochs=2, final_lr_fraction=0.2)
    samples, seen = weighed(answers), list[float]()
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda **how: (seen.append(trainer.optimizer.param_groups[0]["lr"]), step(**how))[1]  # type: ignore[method-assign]
    fixed = Update(9, 0, 1, samples, frozenset(), 1.0)
    losses = [float(trainer._losses(samples, trainer._load(samples), fixed)[0])]
    for _ in range(2):
        report = trainer.step(samples)
        assert report["learning_rate/action_expert"] == seen[-1]
    losses.append(float(trainer._losses(samples, trainer._load(samples), fixed)[0]))
    n = len(seen) // 2
    expected = []
    for k in range(2 * n):
        falling = 0.2 + 0.8 * (1 + cos(pi * (k + 1) / (2 * n))) / 2
        expected.append(2e-3 * falling * min(1.0, (k % n + 1) / 2))
    assert n == 2 * -(-len(samples) // 4) and seen == pytest.approx(expected, rel=1e-9)
    assert losses[1] < losses[0]
    with refused("answer_not_trainable", "here, row 0", len(samples[0].actions) - 1):
        trainer._load.refuse([replace(samples[0], actions=samples[0].actions[:-1])], "here")  # type: ignore[attr-defined]


def whole_answers(folder: Path) -> Artifact:
    calm_policy(folder, n_action_steps=4)
    return Artifact(kind="policy", path=folder, digest="0")


def imitating(**objective: Any) -> TrainVLARLSettings:
    chosen = settings(objective={"name": "reward_weighted", **objective}, learning_rates={"action_expert": 1e-4})
    plan = rollout_settings(batch=4, max_steps=16, likelihood="none", group_size=1, groups_per_step=12)
    return TrainVLARLSettings.model_validate(dict(chosen) | {"rollouts": plan})


def test_resumed_run_with_earlier_steps_equals_uninterrupted_run(tmp_path: Path) -> None:
    start, plan = whole_answers(tmp_path / "start"), imitating(earlier_steps=1)
    whole = train(tmp_path / "whole", start, [Kitchen()], plan)
    with refused("too_many_episodes_failed"):
        train(tmp_path / "stopped", start, [Kitchen(range(20, 10_000))], plan)
    resumed = train(tmp_path / "stopped", start, [Kitchen()], plan)
    assert rows(resumed) == rows(whole) and resumed.lineage(3) == whole.lineage(3)
    weights = [load_file(tmp_path / name / "checkpoint/model.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    for step, row in enumerate(whole.history.read(), start=1):
        played = [read_rollouts(whole.rollouts(number).path) for number in range(max(1, step - 1), step + 1)]
        solved = {each.episode_id for table in played for each in table if each.done and not each.truncated}
        trained = read_batch(whole.batch(step, whole.rollouts(step)).path)
        assert {each.episode_id for each in trained} == solved and solved
        assert row["drops/unsolved_episode"] == sum(each.episode_id not in solved for each in played[-1])
        assert "importance_ratio" not in row and "kl" not in row and row["updates"] == -(-len(trained) // 8)


def test_rejects_partly_executed_chunks(tmp_path: Path) -> None:
    calm_policy(tmp_path / "start")
    start = Artifact(kind="policy", path=tmp_path / "start", digest="0")
    with refused("answers_in_part", "3 of the 4"):
        train(tmp_path, start, [Kitchen()], imitating())


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ({"trainer": {"target_kl": 0.1}}, "target_kl: "),
        ({"trainer": {"kl_coefficient": 0.1, "bc_coefficient": 0.1}}, "kl_coefficient, bc_coefficient: "),
        ({"trainer": {"advantage": {"name": "gae"}}}, "advantage: "),
        ({"trainer": {"ratio": "dimension"}}, "ratio: "),
        ({"rollouts": {"likelihood": "fpo"}}, "rollouts.likelihood fpo"),
        ({"rollouts": {"max_rounds": 2}}, "rollouts.max_rounds"),
        ({"rollouts": {"noise_level": 0.7}}, "noise_level"),
        ({"preflight": {"max_ratio_error": 1.0}}, "preflight: "),
        ({"trainer": {"objective": {"name": "ppo"}}}, "trainer.objective ppo"),
        ({"rollouts": {"reward": {"name": "potential"}}}, "rollouts.reward potential"),
        ({"rollouts": {"reward": {"name": "progress"}}}, "rollouts.reward progress"),
    ],
)
def test_rejects_settings_unused_by_reward_weighting(overrides: dict[str, dict[str, Any]], place: str) -> None:
    values = imitating().model_dump()
    for section, changes in overrides.items():
        values[section] = values[section] | changes
    with refused("value_error", place):
        TrainVLARLSettings.model_validate(values)


def test_rejects_recipe_with_partly_executed_chunks_early() -> None:
    with refused("value_error", "policy.n_action_steps", "policy.chunk_size", kind=ConfigurationError):
        load_recipe("train-vla-rl/spatial-successes", ["policy.n_action_steps=4"])
    load_recipe("train-vla-rl/spatial-successes", ["policy.num_inference_steps=1"])  # no step is drawn


def test_small_weights_give_small_updates(loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]) -> None:
    """One good chunk among many bad ones: updates without it have gradients as small as their weights."""
    samples = [with_advantage(each, 1e-6 if number else 1.0) for number, each in enumerate(answers)]
    trainer, norms = learner(loaded, images, samples_per_update=2, max_grad_norm=1e9), list[tuple[bool, float]]()
    apply = trainer._apply

    def noted(update: Update) -> AppliedUpdate:
        done = apply(update)
        norms.append((samples[0] in update.samples, done.norms["action_expert"]))
        return done

    trainer._apply = noted  # type: ignore[method-assign]
    trainer.step(samples)
    (good,) = (norm for has_it, norm in norms if has_it)
    assert len(norms) > 2 and all(norm < 1e-4 * good for has_it, norm in norms if not has_it), norms


def test_reward_weighted_recipe_needs_no_logprobs_or_pairs() -> None:
    chosen = load_recipe("train-vla-rl/spatial-successes").settings_for(TrainVLARLSettings)
    assert isinstance(chosen, TrainVLARLSettings)
    assert chosen.rollouts.group_size == 1 and isinstance(chosen.trainer.objective, RewardWeighted)
