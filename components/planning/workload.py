"""What episodes ask for: those of a run that was made, or drawn from a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import fmean

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings
from armature.components.rollouts.play import RolloutId


class WorkloadSettings(Settings):
    """Episodes that are drawn: numbers of tokens and seconds are log-normal with a mean and a relative spread."""

    turns: PositiveFloat = Field(description="Mean turns of an episode.")
    max_turns: PositiveInt = Field(description="Most turns of an episode.")
    dialogue: bool = Field(description="Whether a turn's prompt holds the whole conversation before it.")
    prompt_tokens: PositiveInt = Field(512, description="Tokens of the first prompt, images included.")
    turn_tokens: PositiveInt = Field(256, description="Tokens of a later observation, images included.")
    images_per_turn: NonNegativeInt = Field(1, description="Images of an observation.")
    completion_tokens: PositiveFloat = Field(description="Mean tokens of an answer.")
    environment_seconds: NonNegativeFloat = Field(0.05, description="Mean seconds of the environment for a turn.")
    spread: NonNegativeFloat = Field(
        0.5, description="Standard deviation over mean of an episode's turns, answers and seconds; 0: all are alike."
    )
    no_signal: float = Field(0.2, ge=0, le=1, description="Share of the groups whose rewards are equal.")


@dataclass(frozen=True)
class PlannedTurn:
    """`prompt_tokens`: the whole prompt; `new_tokens`: those that no earlier turn of the episode had."""

    prompt_tokens: int
    new_tokens: int
    completion_tokens: int
    images: int
    environment_seconds: float


PlannedEpisode = tuple[PlannedTurn, ...]


@dataclass(frozen=True)
class Workload:
    """Episodes to draw from; `dialogue`: a turn's prompt holds those before it; `source` says where all is from.

    `steps` are the episodes of each step that was made, or one for all: what slowed one episode of a step down may
    have slowed down the others. The steps follow one another, again and again; which of its episodes a rollout is
    depends on `seed` and its place in the run alone, whatever else happens.
    """

    steps: Sequence[Sequence[PlannedEpisode]]
    dialogue: bool
    no_signal: float
    source: str
    seed: int = 0

    def episode(self, place: RolloutId) -> PlannedEpisode:
        key = (self.seed, place.step, place.group, place.member)
        episodes = self.steps[place.step % len(self.steps)]
        return episodes[int(np.random.default_rng(key).integers(len(episodes)))]

    def has_signal(self, place: RolloutId) -> bool:
        """Whether the rewards of the rollout's group differ."""
        return float(np.random.default_rng((self.seed, place.step, place.group)).random()) >= self.no_signal

    def evened(self) -> Workload:
        """Every episode is the mean of all."""
        episodes = [episode for step in self.steps for episode in step]
        every = [turn for episode in episodes for turn in episode]
        mean_turns = fmean(map(len, episodes))
        turns = max(1, round(mean_turns))
        scale = mean_turns / turns
        mean = PlannedTurn(
            prompt_tokens=round(fmean(turn.prompt_tokens for turn in every)),
            new_tokens=round(scale * fmean(turn.new_tokens for turn in every)),
            completion_tokens=max(1, round(scale * fmean(turn.completion_tokens for turn in every))),
            images=round(fmean(turn.images for turn in every)),
            environment_seconds=scale * fmean(turn.environment_seconds for turn in every),
        )
        return replace(self, steps=(((mean,) * turns,),))


def drawn(settings: WorkloadSettings, max_tokens: int, seed: int, source: str) -> Workload:
    """1,024 episodes with answers of at most `max_tokens` tokens."""
    dialogue = settings.dialogue
    random = np.random.default_rng((seed, 0x9A7))
    sigma = sqrt(log(1 + settings.spread**2))

    def draw(mean: float) -> float:
        return mean * float(random.lognormal(-(sigma**2) / 2, sigma))

    episodes = []
    for _ in range(1024):
        turns: list[PlannedTurn] = []
        prompt, images = settings.prompt_tokens, 0
        for index in range(int(np.clip(round(draw(settings.turns)), 1, settings.max_turns))):
            answer = int(np.clip(round(draw(settings.completion_tokens)), 1, max_tokens))
            images = images + settings.images_per_turn if dialogue else settings.images_per_turn
            new = settings.turn_tokens if index and dialogue else prompt
            seconds = draw(settings.environment_seconds)
            turns.append(PlannedTurn(prompt, new, answer, images, seconds))
            prompt += answer + settings.turn_tokens if dialogue else 0
        episodes.append(tuple(turns))
    return Workload((tuple(episodes),), dialogue, settings.no_signal, source, seed)
