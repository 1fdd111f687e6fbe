"""Discrete actions: sampling of tokens, rollouts, and updates by the objectives of language models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import Artifact
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.policies.molmoact2 import policy
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy, save_policy
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.molmoact2.processing.batch import collate
from armature.components.robots.policies.molmoact2.sampling import TokenSampler
from armature.components.robots.rl.batch import build_batch
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import TokenLikelihood
from armature.components.robots.rl.loader import ActionChunkLoader
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import (
    GAE,
    EpisodeGroupMean,
    RobotPreflightSettings,
    RobotRLTrainerSettings,
    TrainVLARLSettings,
)
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
from tests.robots.policies.molmoact2 import released
from tests.robots.rl.kitchen import Kitchen, rollout_settings
from tests.robots.rl.test_run import heldout_set, train

TEMPERATURE = 0.7
CHUNK = 4
"""Number of actions in a chunk of the released policy's tag "kitchen"."""
LEFT, RIGHT = (np.tile(np.array([end, *[0] * 6], np.float32), (CHUNK, 1)) for end in (-0.9, 0.9))


def spoken(folder: Path) -> LoadedPolicy:
    """Return a policy that generates action tokens, with random weights. Most of its answers cannot be decoded to
    actions."""
    settings = released.SETTINGS.model_copy(update={"norm_tag": "kitchen"})
    loaded = load_policy(released.write_released(folder / "released"), settings)
    tokens = ActionTokens.fit([LEFT, RIGHT] * 4, vocabulary=released.ACTIONS, scale=10.0)
    parts = replace(
        loaded.parts,
        settings=loaded.settings.model_copy(update={"action_mode": "discrete"}),
        action_tokens=tokens,
    )
    return replace(loaded, parts=parts)


def of_two_minds(loaded: LoadedPolicy, left: float) -> LoadedPolicy:
    """Return a copy of a policy that answers LEFT with probability `left`, and RIGHT otherwise.

    Its layers add nothing to the embeddings, so the next token depends only on the previous one.
    """
    tokens, model = loaded.parts.action_tokens, copy.deepcopy(loaded.model)
    assert tokens is not None
    (to_left,), (to_right,) = tokens.encode(LEFT), tokens.encode(RIGHT)  # one token each
    ends = [(f"<action_{one}>", "<action_end>") for one in (to_left, to_right)]
    pairs = [
        ("<action_output>", "<action_start>"),
        ("<action_start>", f"<action_{to_left}>"),
        ("<action_start>", f"<action_{to_right}>"),
        *ends,
        ("<action_end>", "<|im_end|>"),
    ]
    before = list(dict.fromkeys(pair[0] for pair in pairs))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if (name.startswith("vlm.model.language_model") and "norm" not in name) or name == "vlm.lm_head.weight":
                weights.zero_()
        model.vlm.model.language_model.norm.weight.fill_(1.0)
        for one, other in pairs:
            place = before.index(one)
            model.vlm.model.language_model.embed_tokens.embedding[released.TOKENS[one], place] = 1.0
            model.vlm.lm_head.weight[released.TOKENS[other], place] = 5.0
        odds = float(np.log(left / (1 - left))) / released.HIDDEN**0.5
        model.vlm.lm_head.weight[released.TOKENS[f"<action_{to_left}>"], before.index("<action_start>")] += odds
    return replace(loaded, model=model)


@pytest.fixture(scope="module", autouse=True)
def _short_answers() -> Iterator[None]:
    """Limit the number of tokens, because random weights hardly ever end an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "TOKENS_PER_ACTION", 3)
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return spoken(tmp_path_factory.mktemp("policy"))


def policy_of(loaded: LoadedPolicy) -> MolmoAct2Policy:
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "discrete", rows=1)


def play(
    loaded: LoadedPolicy, images: ImageStore, processes: Sequence[Kitchen], step: int = 1, **changes: Any
) -> list[ActionChunk]:
    discrete = {"inference_action_mode": "discrete", "temperature": TEMPERATURE, "group_size": 3}
    settings = rollout_settings(**discrete | changes)
    collector = Collector(settings, policy_of(loaded), processes, images, lambda done, total: None)
    bootstrap = loaded.model.value_head is not None
    return collector.collect(plan_step(settings, TASKS, step), step, step - 1, bootstrap).answers


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()])


def learner(
    loaded: LoadedPolicy, images: ImageStore, temperature: float = TEMPERATURE, **changes: Any
) -> RobotRLLearner:
    model = copy.deepcopy(loaded.model)
    rates = dict.fromkeys(("vlm", "vit", "connector"), 1e-3)
    values = {"max_steps": 3, "micro_batch_size": 4, "learning_rates": rates, "mode": "full", "ratio": "token"}
    settings = RobotRLTrainerSettings.model_validate(values | changes)
    prepare(model, settings, loaded.settings.semantics)
    likelihood = TokenLikelihood(InferencePlan.of(loaded.settings, loaded.config), temperature)
    load = ActionChunkLoader(loaded.processor(), images, "discrete", settings.packing)
    return RobotRLLearner(model, settings, likelihood, load)


def judged(answers: Sequence[ActionChunk]) -> list[ActionChunkSample]:
    return [with_advantage(answer, 1.0 - 1.5 * (number % 2)) for number, answer in enumerate(answers)]


def plainly(loaded: LoadedPolicy, images: ImageStore, sample: ActionChunk, model: Any = None) -> np.ndarray:
    """Return ln softmax(logits / temperature) of the sample's K tokens, (K,). Each token has a full forward pass in
    float64."""
    processor, model = loaded.processor(), copy.deepcopy(model or loaded.model).double()
    seen = {name: np.asarray(images.open(ref)) for name, ref in zip(sample.cameras, sample.images, strict=True)}
    example = processor.encode(RobotObservation(seen, sample.state, sample.language))
    tokens = sample.tokens.tolist()
    plan, logprobs = InferencePlan.of(loaded.settings, loaded.config), []
    for number, token in enumerate(tokens):
        ids = np.concatenate([example.input_ids, np.array(tokens[:number], np.int64)])
        marks = np.concatenate([example.image_tokens, np.zeros(number, bool)])
        batch = collate([replace(example, input_ids=ids, image_tokens=marks)], "left", 1, processor.vocabulary.pad)
        with torch.no_grad():
            states = model.encode(batch, plan.bidirectional_images).states
            logits = model.vlm.lm_head(states[0, -1]).numpy() / TEMPERATURE
        logprobs.append(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return np.array(logprobs)


def test_tokens_are_sampled_by_probability_and_independent_of_the_batch() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    rows = 4000
    draws = TokenSampler(range(rows), 0.5, torch.device("cpu"))
    first, second = (draws(logits.expand(rows, -1)).numpy() for _ in range(2))
    expected = torch.softmax(logits.double() / 0.5, 0).numpy()
    for drawn in (first, second):
        counts = np.bincount(drawn, minlength=5)
        assert counts[4] == 0 and chisquare(counts[:4], expected[:4] / expected[:4].sum() * rows).pvalue > 1e-3
    assert (first == second).mean() < 0.9  # another draw for each token
    alone = TokenSampler([7], 0.5, torch.device("cpu"))
    assert [int(alone(logits[None])), int(alone(logits[None]))] == [first[7], second[7]]
    assert np.exp(draws.logprobs.numpy()[:, 0]) == pytest.approx(expected[first], rel=1e-6)


def test_logprobs_equal_a_plain_recomputation(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    for each in answers[:3]:
        assert each.logprobs == pytest.approx(plainly(loaded, images, each), abs=1e-5)
    ended = released.TOKENS["<|im_end|>"]
    assert all(ended not in each.tokens[:-1] for each in answers)
    assert len({each.tokens.tobytes() for each in answers}) == len(answers)
    assert all(each.flow_step is None and not len(each.before) for each in answers)


def test_rollouts_do_not_depend_on_batch_processes_or_crashes(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk], tmp_path: Path
) -> None:
    others = [(8, [Kitchen()]), (4, [Kitchen(), Kitchen((5,)), Kitchen((3, 4)), Kitchen()])]
    tables = []
    for number, played in enumerate([answers, *(play(loaded, images, processes, batch=n) for n, processes in others)]):
        (tmp_path / str(number)).mkdir()
        write_rollouts(tmp_path / str(number), played)
        tables.append((tmp_path / str(number) / "rollouts.parquet").read_bytes())
    assert tables[0] == tables[1] == tables[2]
    undecoded = sum(not each.decoded for each in answers)
    assert build_batch(answers, EpisodeGroupMean(name="group_mean")).metrics["answers/undecoded"] == undecoded > 0


def hand_loss(objective: str, ratio: str, samples: Sequence[ActionChunkSample], now: Sequence[np.ndarray]) -> float:
    """Return the loss of this objective: the mean over all probability ratios, computed from the formula in the
    objective's paper."""
    losses: list[float] = []
    for sample, logprobs in zip(samples, now, strict=True):
        a, change = sample.advantage, logprobs - sample.logprobs
        terms, changes = (logprobs, change) if ratio == "token" else (logprobs.sum()[None], change.sum()[None])
        for lp, d in zip(terms, changes, strict=True):
            r = np.exp(changes.mean() if objective == "gspo" else d)
            low, high = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}.get(objective, (1.0, 1.0))
            if objective == "cispo":
                losses.append(-min(r, 5.0) * a * lp)
                continue
            loss = -min(r * a, np.clip(r, 1 - low, 1 + high) * a)
            losses.append(min(loss, 1.05 * abs(a)) if objective == "ppo" and a < 0 else loss)
    return float(np.mean(losses))


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("ratio", ["token", "chunk"])
def test_updates_follow_the_objectives_formulas(
    objective: str, ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk], tmp_path: Path
) -> None:
    write_batch(tmp_path, judged(answers[:4]))
    samples = read_batch(tmp_path)
    options = {"name": objective} | ({"dual_clip": 1.05} if objective == "ppo" else {})
    trainer = learner(loaded, images, objective=options, ratio=ratio)
    sampled = np.array([each.logprobs.sum() for each in samples])
    before = np.array(trainer.score(samples))
    assert np.abs(np.expm1(before - sampled)).max() < 1e-5  # what the pre-flight asks for
    first = trainer.step(samples)
    assert first["importance_ratio"] == pytest.approx(1.0, abs=1e-5) and first["kl"] < 1e-9
    start = [each.logprobs for each in samples]
    assert first["loss"] == pytest.approx(hand_loss(objective, ratio, samples, start), rel=1e-4, abs=1e-6)
    change = np.array(trainer.score(samples)) - before
    assert float(np.array([each.advantage for each in samples]) @ change) > 0
    moved = [plainly(loaded, images, each, trainer.model) for each in samples]
    second = trainer.step(samples)
    assert second["loss"] == pytest.approx(hand_loss(objective, ratio, samples, moved), rel=1e-3, abs=1e-5)
    assert second["kl"] > 0
    for name, weights in trainer.model.action_expert.named_parameters():  # has no part in it
        assert torch.equal(weights, loaded.model.action_expert.get_parameter(name))


def test_micro_batch_size_does_not_change_the_update(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = judged(answers[:4])
    reports = [learner(loaded, images, micro_batch_size=width).step(samples) for width in (1, 4, 100)]
    for report in reports[1:]:
        assert report["grad_norm"] == pytest.approx(reports[0]["grad_norm"], rel=1e-4)
        assert report["loss"] == pytest.approx(reports[0]["loss"], abs=1e-6)
    alone = learner(loaded, images, micro_batch_size=1)
    scores = alone.score(samples)
    assert [alone.score([each])[0] for each in reversed(samples)] == scores[::-1]  # to the last bit


def test_rollout_values_equal_the_trainers_values(loaded: LoadedPolicy, images: ImageStore) -> None:
    valued = replace(loaded, model=copy.deepcopy(loaded.model))
    policy_of(valued).add_value_head(0)
    head = valued.model.value_head
    assert head is not None
    torch.nn.init.normal_(head.layers[-1].weight, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    played = play(valued, images, [Kitchen()])
    values = [each.value for each in played]
    assert len(set(values)) > 1 and any(each.last_value for each in played if each.truncated)
    trainer = learner(loaded, images, advantage={"name": "gae"})
    assert trainer.model.value_head is not None
    trainer.model.value_head.load_state_dict(head.state_dict())
    samples = build_batch(played, GAE(name="gae")).samples
    with torch.no_grad():
        part = trainer._load(samples)
        predicted = trainer.model.value_head(trainer.likelihood.predict(trainer.model, part)[0].states)
    assert predicted.tolist() == pytest.approx(values, abs=1e-5)
    report = trainer.step(samples)
    expected = np.mean([0.5 * (each.value - each.value_target) ** 2 for each in samples])  # type: ignore[operator]
    assert report["value/loss"] == pytest.approx(expected, rel=1e-4)


def test_policy_learns_the_rewarded_action(loaded: LoadedPolicy, images: ImageStore) -> None:
    current, shares = of_two_minds(loaded, 0.3), []
    rates = dict.fromkeys(("vlm", "vit", "connector"), 0.05)
    trainer = learner(current, images, 1.0, learning_rates=rates, final_lr_fraction=1.0, epochs=4)
    assert loaded.parts.action_tokens is not None
    left = released.TOKENS["<action_0>"] + loaded.parts.action_tokens.encode(LEFT)[0]
    for step in range(1, 4):
        current = replace(current, model=copy.deepcopy(trainer.model))
        answers = play(current, images, [Kitchen()], step, temperature=1.0, group_size=8)
        assert all(each.decoded and len(each.tokens) == 4 for each in answers)
        shares.append(np.mean([each.tokens[1] == left for each in answers]))
        trainer.step(build_batch(answers, EpisodeGroupMean(name="group_mean")).samples)
    assert shares[0] < 0.5 and shares[-1] > shares[0] + 0.3, shares


def test_run_with_action_tokens_and_evaluations(loaded: LoadedPolicy, tmp_path: Path) -> None:
    """The same run samples with a temperature and evaluates without one."""
    minded = of_two_minds(loaded, 0.3)
    save_policy(tmp_path / "start/checkpoint", minded.parts, minded.model.state_dict())
    rates = dict.fromkeys(("vlm", "vit", "connector"), 0.05)
    trainer = {"max_steps": 2, "mode": "full", "ratio": "token", "micro_batch_size": 8, "epochs": 4}
    plan = TrainVLARLSettings(
        simulator=SimulatorSettings(),
        rollouts=rollout_settings(inference_action_mode="discrete", batch=4, group_size=8),
        trainer=RobotRLTrainerSettings.model_validate(trainer | {"learning_rates": rates}),
        preflight=RobotPreflightSettings(),
        evaluation=heldout_set(inference_action_mode="discrete", every=2),
    )
    run = train(tmp_path, Artifact(kind="policy", path=tmp_path / "start", digest="0"), [Kitchen()], plan)
    first, *_, last = run.history.read()
    assert first["heldout/success"] == 0.0  # the likelier token is always said
    assert last["updates"] > 0 and last["importance_ratio"] > 0 and last["heldout/p_value"] <= 1.0
    assert run.evaluations is not None and run.evaluations.metrics[0]["episodes"] == 12


def test_rejects_samples_of_another_action_kind(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    load, samples = ActionChunkLoader(loaded.processor(), images, "discrete"), judged(answers)
    load.refuse(samples, "here")
    unknown = replace(samples[0], tokens=np.full_like(samples[0].tokens, 100_000))
    for wrong in (
        replace(samples[0], tokens=samples[0].tokens[:-1]),
        replace(samples[0], tokens=samples[0].tokens[:0], logprobs=samples[0].logprobs[:0]),
        replace(samples[0], before=np.zeros(3, np.float32)),
        unknown,
        replace(samples[0], logprobs=np.full_like(samples[0].logprobs, np.nan)),
    ):
        with refused("answer_not_trainable", "here, row 0", samples[0].episode_id):
            load.refuse([wrong], "here")
