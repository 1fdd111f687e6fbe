"""Learning curves from a run's history: one dict of numbers per step. The page's script draws them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

History = Sequence[Mapping[str, float]]
MOST_POINTS = 1500


@dataclass(frozen=True)
class Panel:
    """One chart. `series` are history keys, or a regular expression where one begins with ^.

    `band` is the key of a half-width, drawn around the first series, or a pair of keys (low, high). `axis` is
    what the key "step" counts.
    """

    title: str
    series: tuple[str, ...]
    unit: str = ""
    band: str | tuple[str, str] | None = None
    log: bool = False
    axis: str = "step"


@dataclass(frozen=True)
class Curves:
    """Charts and the rows that all of them draw; each row has the key "step"."""

    panels: Sequence[Panel]
    rows: History


PANELS = (
    Panel("Reward of the rollouts", ("reward",), band="reward/rollout_std"),
    Panel("Success of the rollouts", ("success",)),
    Panel("Held-out accuracy", ("heldout/accuracy",), band=("heldout/low", "heldout/high")),
    Panel("Held-out success", ("heldout/success",), band=("heldout/low", "heldout/high")),
    Panel("Held-out episodes gained and lost", ("heldout/gained", "heldout/lost")),
    Panel("Actions of a held-out episode", ("heldout/steps",)),
    Panel("Answers of an episode", ("answers/per_episode",)),
    Panel("Answers of a step that say no actions", ("answers/undecoded",)),
    Panel("Reward by part", (r"^reward_parts/",)),
    Panel(
        "Mismatch KL, trainer against sampler",
        ("mismatch_kl", "mismatch_kl/first_update"),
        unit="nats per token",
        log=True,
    ),
    Panel("Importance ratio", ("importance_ratio", "ratio/p01", "ratio/p50", "ratio/p99")),
    Panel("KL of a step's updates, from the policy that played", ("kl",), unit="nats", log=True),
    Panel("KL to the policy that the training began with", ("kl/start",), unit="nats", log=True),
    Panel("Probability of a demonstrated token", ("probability",)),
    Panel("Entropy", ("entropy",), unit="nats per token"),
    Panel("Loss", ("loss", "heldout/loss")),
    Panel("Loss by part", ("loss/flow", "loss/cross_entropy", "loss/z"), log=True),
    Panel("Loss of behavior cloning", ("bc/loss",)),
    Panel(
        "Error of held-out actions, and of the mean action",
        ("heldout/action_error", "heldout/mean_action_error"),
        unit="standard deviations",
    ),
    Panel("Loss of the value head", ("value/loss",), log=True),
    Panel("Returns and the values that were predicted", ("return/mean", "value/mean")),
    Panel("Variance of the returns that values explain", ("value/explained_variance",)),
    Panel("Learning rate", (r"^learning_rate/",)),
    Panel("Gradient norm", ("grad_norm", r"^grad_norm/"), log=True),
    Panel(
        "Fractions",
        (
            "groups/zero_advantage_fraction",
            "masked_fraction",
            "clipped_low_fraction",
            "clipped_high_fraction",
            "value/clipped_fraction",
            "padding_fraction",
            "truncated/length",
            "actions/format_defect",
            "actions/inadmissible",
        ),
    ),
    Panel(
        "Advantages",
        ("advantage/turn_absmean", "advantage/episode_absmean", "advantage/step_absmean", "penalty/mean"),
    ),
    Panel("Turns at one state", ("anchors/size", "anchors/size_max", "anchors/singleton_fraction"), log=True),
    Panel(
        "Groups of a step",
        ("groups/played", "groups/equal_rewards", "groups/surplus", "groups/rounds"),
    ),
    Panel("Completion length", ("tokens/completion", "tokens/completion_max"), unit="tokens"),
    Panel("Time of a step", (r"^timing/(wait_for_rollouts|batch|train|sync|evaluation)$",), unit="seconds"),
    Panel("Samples per second", ("samples_per_second", "answers_per_second")),
    Panel("Left out, by reason", (r"^failures/", r"^drops/"), unit="per step"),
    Panel("Memory of the trainer", (r"^memory/",), unit="GiB"),
)


def training_curves(history: History) -> Curves:
    """Charts of a training's history, thinned out where it is long."""
    numbered = [{"step": float(place), **row} for place, row in enumerate(history)]
    return Curves(panels_of(numbered), thinned(numbered, MOST_POINTS))


def panels_of(history: History) -> list[Panel]:
    """Return the panels that this history has numbers for, their `series` being its keys."""
    keys = sorted({key for row in history for key in row})
    panels = []
    for panel in PANELS:
        names: list[str] = []
        for series in panel.series:
            matching = [k for k in keys if re.match(series, k)] if series.startswith("^") else [series]
            names += [key for key in matching if key in keys and key not in names]
        if names:
            panels.append(replace(panel, series=tuple(names)))
    return panels


def thinned(history: History, most: int) -> list[Mapping[str, float]]:
    """Return about `most` of the rows, evenly spread, the last and those of evaluations among them."""
    every = -(-len(history) // most)
    if every <= 1:
        return list(history)
    return [
        row
        for place, row in enumerate(history, 1)
        if place % every == 0 or place == len(history) or "heldout/accuracy" in row
    ]
