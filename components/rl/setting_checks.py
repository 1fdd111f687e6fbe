"""Checks that ten settings of a recipe act: `armature check RECIPE --settings`.

The rollouts of a trial are from the run's servers. A learner of the kind that a run has then trains in this process: on
advantages of 1, and on tokens whose ratio is outside of the clipping bounds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from math import isclose, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from armature.components.configuration.recipes import SettingRow
from armature.components.contracts.batches import Sample
from armature.components.contracts.episodes import Environment
from armature.components.contracts.rollouts import GenerateOutputs, LogProbs, Trajectory
from armature.components.environments.make import make_environment
from armature.components.environments.mixture import EnvironmentMixture
from armature.components.families.family import COMPONENTS, family_of
from armature.components.inference.command import vocabulary
from armature.components.models.lora import ALL_LINEARS
from armature.components.rl.agreement import compare
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rl.trial import BlankImages, Trial, TrialLearner
from armature.components.rollouts.batches.table import SampleSource
from armature.components.vlm.settings import CISPO, GSPO, PPO, MaskRatio, NoCorrection, TrainerSettings

FEW = 8
"""Number of samples that the learner gets."""
BEGINNING = 8
"""Number of tokens of an answer that are compared with the answer of the same or another seed."""


def check_settings(settings: TrainVLMSettings, weights: Path, trial: Trial, device: torch.device) -> list[SettingRow]:
    """Return a row for each of the ten settings.

    Args:
        weights: folder of the initial model.
        device: device of the copy of the model that is trained here.
    """
    samples = _few(trial.adapter, trial.outputs)
    colder = _few(trial.adapter, trial.other_temperature)
    temperature = settings.rollouts.sampling.temperature
    learner = TrialLearner(settings, weights, trial.images, temperature / 2, device, kl_coefficient=0.0)
    halved = compare(colder, learner.score(colder)).mismatch_kl
    del learner
    gc.collect()  # a model on a GPU has room for itself only
    learner = TrialLearner(settings, weights, trial.images, temperature, device)
    usual = compare(colder, learner.score(colder)).mismatch_kl
    allowed = np.setdiff1d(np.arange(vocabulary(weights)[0]), learner.forbidden)
    images, clipping = images_row(trial, learner, samples), clipping_row(settings.trainer, learner, samples, allowed)
    before = learner.weights()
    learner.step(_with_advantage(_with_ratio(samples, learner.score(samples), 1.0), 1.0))
    changed = learner.changed(before)
    return [
        freeze_row(settings, learner, changed),
        lora_row(settings, learner, changed),
        images,
        reward_row(settings, trial),
        kl_row(settings.trainer, learner, samples),
        clipping,
        staleness_row(settings, trial),
        temperature_row(temperature, settings.preflight.max_mismatch_kl, halved, usual),
        seed_row(trial),
        image_size_row(settings, trial),
    ]


def _few(adapter: SampleSource, outputs: GenerateOutputs) -> list[Sample]:
    """Return a few of the samples that become of the rollouts, of different groups."""
    samples, _ = adapter.samples(outputs)
    return samples[:: max(1, len(samples) // FEW)][:FEW]


def not_set(setting: str) -> SettingRow:
    """Return the row of a setting that the recipe does not use."""
    return SettingRow(setting, "", "not set", None)


def freeze_row(settings: TrainVLMSettings, learner: TrialLearner, changed: set[str]) -> SettingRow:
    """Return the row of `model.freeze`, given the names of the weights that a step changed."""
    frozen, family = settings.model.freeze, family_of(learner.network.config)
    if not frozen:
        return not_set("model.freeze")
    totals = Counter(family.component_of(name) for name, _ in learner.network.named_parameters())
    counts = Counter(family.component_of(name) for name in changed)
    observed = ", ".join(f"{part} {counts[part]} of {totals[part]}" for part in COMPONENTS if totals[part])
    acts = bool(changed) and not any(counts[part] for part in frozen)
    return SettingRow("model.freeze", f"a step changes no tensor of {', '.join(frozen)}", observed, acts)


def lora_row(settings: TrainVLMSettings, learner: TrialLearner, changed: set[str]) -> SettingRow:
    """Return the row of `model.lora.targets`, given the names of the weights that a step changed."""
    lora, family = settings.model.lora, family_of(learner.network.config)
    if lora is None:
        return not_set("model.lora.targets")
    layers = {
        name: isinstance(module, LoraLayer)
        for name, module in learner.network.named_modules()
        if isinstance(module, nn.Linear | LoraLayer) and ".lora_" not in name and ".base_layer" not in name
    }
    parts = set(COMPONENTS if lora.scope == "all" else ("language",)) - set(settings.model.freeze)
    everything = ALL_LINEARS in lora.targets
    expected = {
        name
        for name in layers
        if family.component_of(name) in parts
        and (name.rpartition(".")[2] in lora.targets or (everything and not name.endswith("lm_head")))
    }
    adapted, others = {name for name, has in layers.items() if has}, [name for name in changed if ".lora_" not in name]
    return SettingRow(
        "model.lora.targets",
        f"{len(expected)} layers have adapters, and only these change",
        f"{len(adapted & expected)} have, and {len(adapted - expected)} others; "
        f"{len(changed)} tensors change, {len(others)} of others",
        adapted == expected and bool(changed) and not others,
    )


def images_row(trial: Trial, learner: TrialLearner, samples: Sequence[Sample]) -> SettingRow:
    """Return the row of the images: the log-probs of the model's answers depend on them."""
    seen = [sample for sample in samples if sample.images]
    if not seen:
        return not_set("images")
    scores, again = learner.score(seen), learner.score(seen)
    blank = learner.score(seen, BlankImages(trial.images.root))
    noise, difference = _largest(scores, again), _largest(scores, blank)
    return SettingRow(
        "images",
        "blank images change log-probs",
        f"by {difference:.2g}; the same images by {noise:.2g}",
        difference > max(1e-5, 3 * noise),
    )


def _largest(one: Sequence[LogProbs], other: Sequence[LogProbs]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def reward_row(settings: TrainVLMSettings, trial: Trial) -> SettingRow:
    """Return the row of the weights of rewards, in the arguments of the environment."""
    args = settings.environment.args
    if (doubled := _doubled(args)) == args:
        return not_set("reward weights")
    twice = settings.environment.model_copy(update={"args": doubled})
    with closing(make_environment(settings.environment)) as environment, closing(make_environment(twice)) as other:
        weights, doubled_weights = dict(environment.reward_weights), dict(other.reward_weights)
        played = trial.outputs.trajectories
        equal = [isclose(each.reward, _weighted(environment, each), rel_tol=1e-6, abs_tol=1e-9) for each in played]
    follows = all(isclose(doubled_weights[part], 2 * weight, abs_tol=1e-12) for part, weight in weights.items())
    shown = ", ".join(f"{part} {weight:g}" for part, weight in weights.items())
    return SettingRow(
        "reward weights",
        f"rewards are sums with the recipe's weights: {shown}",
        f"{sum(equal)} of {len(equal)} rollouts; weights {'follow' if follows else 'do not follow'} the recipe",
        follows and all(equal),
    )


def _weighted(environment: Environment, played: Trajectory) -> float:
    """Return the weighted sum of the parts of a rollout's reward. The environment may be a mixture."""
    if isinstance(environment, EnvironmentMixture):
        environment = environment.parts[played.environment].environment
    return sum(environment.reward_weights[name] * value for name, value in played.reward_parts.items())


def _doubled(value: Any) -> Any:
    """Return arguments of an environment with all weights of rewards doubled."""
    if isinstance(value, list | tuple):
        return type(value)(map(_doubled, value))
    if not isinstance(value, dict):
        return value
    # An environment of a mixture has a weight of its own, which is its share of the tasks.
    weighted = {key for key in value if key == "weight" or key.endswith("_weight")} - (
        {"weight"} if "heldout_tasks" in value else set()
    )
    return {key: 2 * item if key in weighted else _doubled(item) for key, item in value.items()}


def kl_row(trainer: TrainerSettings, learner: TrialLearner, samples: Sequence[Sample]) -> SettingRow:
    """Return the row of the KL coefficient. Call it after a step, because initial weights have a KL of 0."""
    coefficient = trainer.kl_coefficient
    if coefficient == 0:
        return not_set("trainer.kl_coefficient")
    # Without advantages the KL is the only gradient.
    still = _with_advantage(_with_ratio(samples, learner.score(samples), 1.0), 0.0)
    plain = {"objective": PPO(name="ppo"), "correction": NoCorrection(mode="none")}
    norms = [learner.gradient_norm(still, **plain, kl_coefficient=factor * coefficient) for factor in (1, 2)]
    return SettingRow(
        "trainer.kl_coefficient",
        "twice the coefficient has twice the gradient",
        f"norms of the KL alone: {norms[0]:.3g}, {norms[1]:.3g}",
        norms[0] > 0 and isclose(norms[1], 2 * norms[0], rel_tol=0.1),
    )


def clipping_row(
    trainer: TrainerSettings, learner: TrialLearner, samples: Sequence[Sample], allowed: np.ndarray[Any, Any]
) -> SettingRow:
    """Return the row of the bounds of ratios, of the objective and of the importance correction.

    Without a bound, a ratio twice as far away has a gradient twice as large, or half as large below.

    Args:
        allowed: ids of the tokens that can be sampled.
    """
    bounds, setting = list(_bounds(trainer)), "clipping of ratios"
    if not bounds:
        return not_set(setting)
    samples = _with_random_tokens(samples, allowed)
    scores = learner.score(samples)
    plain, observed, acts = {"kl_coefficient": 0.0}, [], True

    def norm(ratio: float, advantage: float, changes: dict[str, Any]) -> float:
        return learner.gradient_norm(_with_advantage(_with_ratio(samples, scores, ratio), advantage), **changes)

    for name, bound, above, advantage, changes in bounds:
        near, far = (norm(bound * (k if above else 1 / k), advantage, plain | changes) for k in (2, 4))
        inside = norm(1.0, advantage, plain | changes)
        observed.append(f"{name} {near:.3g}, {far:.3g}, inside {inside:.3g}")
        acts &= inside > 0 and (near == far or isclose(near, far, rel_tol=0.2))
    return SettingRow(setting, "gradients do not grow beyond the bounds", "; ".join(observed), acts)


def _bounds(trainer: TrainerSettings) -> Iterator[tuple[str, float, bool, float, dict[str, Any]]]:
    """Yield each bound: name, ratio, True for an upper one, an advantage for which it acts, and settings for it."""
    objective, correction = trainer.objective, trainer.correction
    alone: dict[str, Any] = {"correction": NoCorrection(mode="none")}
    if isinstance(objective, PPO | GSPO | CISPO):
        yield "clip_high", 1 + objective.clip_high, True, 1.0, alone
    if isinstance(objective, PPO | GSPO):
        yield "clip_low", 1 - objective.clip_low, False, -1.0, alone
    if isinstance(objective, PPO) and objective.dual_clip is not None:
        yield "dual_clip", objective.dual_clip, True, -1.0, alone
    if isinstance(objective, MaskRatio):
        yield "mask_ratio_high", objective.mask_ratio_high, True, 1.0, alone
        if objective.mask_ratio_low > 0:
            yield "mask_ratio_low", objective.mask_ratio_low, False, 1.0, alone
    if not isinstance(correction, NoCorrection):
        yield "correction.cap", correction.cap, True, 1.0, {}
        if correction.floor > 0:
            yield "correction.floor", correction.floor, False, 1.0, {}


def staleness_row(settings: TrainVLMSettings, trial: Trial) -> SettingRow:
    """Return the row of `rollouts.max_staleness`."""
    expected = settings.rollouts.max_staleness
    return SettingRow(
        "rollouts.max_staleness",
        f"weights that play are {expected} versions old at most",
        f"{', '.join(map(str, trial.lags))} in steps 1 to {len(trial.lags)}",
        max(trial.lags) == expected,
    )


def temperature_row(temperature: float, most: float, halved: float, usual: float) -> SettingRow:
    """Return the row of the temperature.

    Args:
        most: largest mismatch KL that the pre-flight accepts.
        halved: mismatch KL of rollouts at half the temperature with a trainer at half the temperature.
        usual: mismatch KL of the same rollouts with a trainer at the whole temperature.
    """
    return SettingRow(
        "sampling.temperature",
        f"servers at {temperature / 2:g} agree with a trainer at {temperature / 2:g}, not {temperature:g}",
        f"mismatch KL {halved:.2g}, {usual:.2g}",
        halved <= most and usual > 3 * halved,
    )


def seed_row(trial: Trial) -> SettingRow:
    """Return the row of `rollouts.seed`, from answers of the servers to the same requests.

    Only their first tokens are compared, and a few may differ: with servers on GPUs that are not deterministic, long
    answers with the same seed differ in the end.
    """
    same, other = (_equal_share(trial.outputs, each) for each in (trial.repeated, trial.other_seed))
    return SettingRow(
        "rollouts.seed",
        "servers sample the same again, and else with another seed",
        f"{same:.0%} of the answers begin equally, {other:.0%}",
        same >= 0.75 and 1 - same < (1 - other) / 3,
    )


def _equal_share(one: GenerateOutputs, other: GenerateOutputs) -> float:
    """Return the share of the rollouts in `one` that begin with the same `BEGINNING` tokens in `other`."""

    def beginning(played: Trajectory) -> list[int]:
        return np.concatenate([turn.completion_token_ids for turn in played.turns])[:BEGINNING].tolist()

    others = {each.trajectory_id: beginning(each) for each in other.trajectories}
    equal = [beginning(each) == others.get(each.trajectory_id) for each in one.trajectories]
    return sum(equal) / len(equal)


def image_size_row(settings: TrainVLMSettings, trial: Trial) -> SettingRow:
    """Return the row of `image_size` in the arguments of the environment."""
    sizes = set(_values(settings.environment.args, "image_size"))
    shown = {ref for each in trial.outputs.trajectories for turn in each.turns for ref in turn.images}
    if not sizes or not shown:
        return not_set("image_size")
    counts = Counter((ref.width, ref.height) for ref in shown)
    return SettingRow(
        "image_size",
        "images are " + " or ".join(f"{size} x {size}" for size in sorted(sizes)),
        ", ".join(f"{count} are {width} x {height}" for (width, height), count in sorted(counts.items())),
        set(counts) <= {(size, size) for size in sizes},
    )


def _values(value: Any, key: str) -> Iterator[int]:
    """Yield the values of `key` in nested arguments."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key and isinstance(item, int):
                yield item
            yield from _values(item, key)


# --- Samples with other tokens, ratios or advantages ---


def _with_advantage(samples: Sequence[Sample], advantage: float) -> list[Sample]:
    return [
        replace(sample, advantages=np.where(sample.loss_mask, advantage, 0).astype(np.float32)) for sample in samples
    ]


def _with_ratio(samples: Sequence[Sample], scores: Sequence[LogProbs], ratio: float) -> list[Sample]:
    """Return samples whose ratio to the sampler is `ratio` for the policy that computed `scores`.

    Tokens are left out of the loss if the sampler's probability would have to be above 1.
    """
    changed = []
    for sample, score in zip(samples, scores, strict=True):
        behavior = np.where(sample.loss_mask, score - log(ratio), 0).astype(np.float32)
        mask = sample.loss_mask & (behavior <= 0)
        changed.append(replace(sample, behavior_logprobs=behavior, loss_mask=mask))
    return changed


def _with_random_tokens(samples: Sequence[Sample], allowed: np.ndarray[Any, Any]) -> list[Sample]:
    """Return samples with random completions, which are so improbable that the sampler may have a larger one."""
    random, changed = np.random.default_rng(0), []
    for sample in samples:
        tokens = random.choice(allowed, len(sample.input_ids))
        changed.append(replace(sample, input_ids=np.where(sample.loss_mask, tokens, sample.input_ids).astype(np.int32)))
    return changed
