"""The number of episodes that finds a lie: formulas against enumeration, and replays of honest and false claims."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import stages
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.episodes import Task
from armature.components.contracts.stages import StageReport
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.agreement import (
    choose,
    compare,
    detection_probability,
    differences_needed,
    episodes_needed,
    obstacles_to_bits,
    sign_test,
)
from armature.components.evaluation.bundle import EpisodeClaim, episode_claims
from armature.components.evaluation.results import EpisodeResult
from armature.components.evaluation.settings import EvaluationSettings
from armature.components.rollouts.collect import collect
from armature.components.rollouts.play import RolloutId
from tests.builders import make_machine
from tests.evaluation.bundles import PLAN, ScriptedPool
from tests.evaluation.test_results import COLORS
from tests.rollouts.conftest import RecordedEvents

EPISODES, CHOICES = 10, 500
SETTINGS = EnvironmentSettings.model_validate(COLORS | {"train_tasks": 1, "heldout_tasks": EPISODES})
ENVIRONMENT = make_environment(SETTINGS)
TASKS: Sequence[Task] = list(ENVIRONMENT.tasks("heldout"))


def played(folder: Path, name: str, seed: int = 0, chosen: Sequence[EpisodeClaim] | None = None) -> list[EpisodeClaim]:
    """Play all episodes, or the chosen ones, with the scripted policy `name`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"skill": 0.5, "name": name}))
    plan = EvaluationSettings.model_validate(PLAN | {"seed": seed})
    only = None if chosen is None else {RolloutId.parse(each.result.trajectory_id) for each in chosen}
    outputs = asyncio.run(
        collect(
            ENVIRONMENT,
            TASKS,
            1,
            ScriptedPool(folder),
            ImageStore(folder / "images"),
            plan.sampling,
            step=0,
            seed=seed,
            machine=make_machine(),
            events=RecordedEvents(),
            only=only,
        )
    )
    return episode_claims(outputs, TASKS, plan)


def test_detection_probability_equals_enumeration():
    for episodes, falsified, replayed, differing in itertools.product(range(1, 8), range(8), range(1, 8), (1, 2, 3)):
        if max(falsified, replayed) <= episodes:
            drawn = list(itertools.combinations(range(episodes), replayed))
            detected = sum(sum(each < falsified for each in choice) >= differing for choice in drawn)
            expected = Fraction(detected, len(drawn))
            assert detection_probability(episodes, falsified, replayed, differing) == expected


@pytest.mark.parametrize("episodes", [1, 7, 100, 256, 5000])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("differing", [1, 8])
def test_number_of_episodes_is_the_smallest(episodes, share, differing):
    needed, falsified = episodes_needed(episodes, share, 0.99, differing), math.ceil(episodes * share)
    if falsified < differing:
        assert needed == episodes
        return
    assert detection_probability(episodes, falsified, needed, differing) >= Fraction(99, 100)
    assert needed == 1 or detection_probability(episodes, falsified, needed - 1, differing) < Fraction(99, 100)


def test_number_of_episodes_approaches_the_logarithm():
    for share in (0.01, 0.05, 0.3):
        limit = math.ceil(math.log(1 - 0.99) / math.log(1 - share))
        assert limit - 2 <= episodes_needed(100_000, share, 0.99) <= limit


def test_sign_test_equals_enumeration_and_keeps_its_level():
    for number in range(11):
        signs = [sum(each) for each in itertools.product((0, 1), repeat=number)]
        for first in range(number + 1):
            extreme = sum(abs(each - number / 2) >= abs(first - number / 2) for each in signs)
            assert sign_test(first, number - first) == extreme / 2**number
    for number, level in itertools.product(range(60), (0.05, 0.01, 0.001)):
        refuted = [first for first in range(number + 1) if sign_test(first, number - first) <= level]
        assert sum(math.comb(number, first) for first in refuted) / 2**number <= level
    assert (differences_needed(0.99), differences_needed(0.95)) == (8, 6)


def test_one_hundred_honest_bundles_pass(tmp_path):
    needed = episodes_needed(EPISODES, 0.5, 0.99)
    for seed in range(100):
        claimed = played(tmp_path / "policy", "honest", seed)
        chosen = choose(claimed, needed, seed)
        agreement = compare(chosen, played(tmp_path / "policy", "honest", seed, chosen))
        assert (agreement.compared, agreement.different, agreement.p) == (needed, (), 1.0)


def changed_rows(number):
    def lie(claims: list[EpisodeClaim]) -> list[EpisodeClaim]:
        return [
            replace(each, result=replace(each.result, solved=not each.result.solved)) if index < number else each
            for index, each in enumerate(claims)
        ]

    return lie


LIES = {
    "one row": (changed_rows(1), 1),
    "three rows": (changed_rows(3), 3),
    "all rows": (changed_rows(EPISODES), EPISODES),
    "seed": ("other seed", EPISODES),
    "policy": ("other policy", EPISODES),
    "versions": ("other versions", EPISODES),
}
"""Lies, and the number of rows that they falsify: other weights, seeds or kernels change the log-probs of all."""


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_as_often_as_computed(tmp_path, lie):
    truth = played(tmp_path / "policy", "honest")
    change, falsified = LIES[lie]
    if change == "other seed":
        pairs = zip(played(tmp_path / "policy", "honest", 1), truth, strict=True)
        claimed = [replace(each, seed=real.seed) for each, real in pairs]
    elif change == "other policy":
        claimed = played(tmp_path / "other", "better")
    elif change == "other versions":
        claimed = [replace(each, logprobs="0" * 64) for each in truth]
    else:
        claimed = change(truth)
    assert len(compare(claimed, truth).different) == falsified
    for replayed in (1, 3, episodes_needed(EPISODES, falsified / EPISODES, 0.99)):
        detected = sum(bool(compare(choose(claimed, replayed, seed), truth).different) for seed in range(CHOICES))
        p = 1 - math.comb(EPISODES - falsified, replayed) / math.comb(EPISODES, replayed)
        assert abs(detected / CHOICES - p) <= 4 * math.sqrt(p * (1 - p) / CHOICES) + 1e-12


def test_outcomes_find_what_eight_differences_show(tmp_path):
    honest = played(tmp_path / "policy", "honest")
    truth = [replace(each, result=replace(each.result, solved=False)) for each in honest]
    for number in range(10):
        agreement = compare(changed_rows(number)(truth), truth)
        assert (agreement.only_claimed, agreement.only_replayed) == (number, 0)
        assert agreement.p == min(1, 2 / 2**number)


def test_failed_episodes_are_not_chosen_and_not_compared(tmp_path):
    truth = played(tmp_path / "policy", "honest")
    failed = replace(truth[0], result=replace(truth[0].result, failure="server_lost", reward=None, solved=False))
    assert len(choose([failed, *truth[1:]], EPISODES, 0)) == EPISODES - 1
    assert compare(truth, [failed, *truth[1:]]).compared == EPISODES - 1


def test_choice_depends_on_the_seed_only():
    results = [
        EpisodeResult(f"000000-{index:04d}-00", f"t{index}", "heldout", "all", True, 1.0) for index in range(100)
    ]
    claims = [EpisodeClaim(0, result, "a", "b") for result in results]
    assert choose(claims, 10, 3) == choose(claims, 10, 3) != choose(claims, 10, 4)
    share = sum(claims[0] in choose(claims, 10, seed) for seed in range(CHOICES)) / CHOICES
    assert abs(share - 0.1) < 4 * math.sqrt(0.09 / CHOICES)


HERE = {"armature": "1", "commit": "a", "device": "cpu", "processor": "x", "vllm": "2"}


@pytest.mark.parametrize(
    ("change", "promised"),
    [
        ({}, True),
        ({"commit": ""}, True),
        ({"commit": "b"}, False),
        ({"vllm": "3"}, False),
        ({"processor": "y"}, False),
        ({"device": "gpu"}, False),
    ],
)
def test_bits_are_promised_for_equal_versions(change, promised):
    assert (obstacles_to_bits(HERE | change, HERE) == []) is promised
    assert obstacles_to_bits(HERE | {"\x1b[2J\nequal": "1"}, HERE) == ["unknown versions"]
    assert obstacles_to_bits({}, HERE) and obstacles_to_bits(HERE | {"device": "gpu"}, HERE | {"device": "gpu"}) == [
        "device"
    ]


def test_versions_are_unknown_if_attempts_ran_with_several(tmp_path, monkeypatch):
    def attempt(version: str, folder: str) -> dict[str, str]:
        stage = replace(STAGES["tasks"], run=stop, versions=lambda machine: {"torch": version})
        monkeypatch.setattr(stages, "STAGES", {"tasks": stage})
        with pytest.raises(KeyboardInterrupt):
            run_stage("tasks", SETTINGS, {}, make_machine(store=tmp_path / folder))
        (started,) = (tmp_path / folder).glob("workspaces/tasks-*/stage.json")
        recorded = json.loads(started.read_text())["versions"]
        if folder == "damaged":
            started.write_text('{"versions": {"torch": "1')
        return recorded

    def stop(*arguments: object) -> StageReport:
        raise KeyboardInterrupt

    assert [attempt(each, "same") for each in ("1", "1")] == [{"torch": "1"}, {"torch": "1"}]
    assert [attempt(each, "other") for each in ("1", "2", "2")] == [{"torch": "1"}, {}, {}]
    assert [attempt(each, "damaged") for each in ("1", "1")] == [{"torch": "1"}, {}]
