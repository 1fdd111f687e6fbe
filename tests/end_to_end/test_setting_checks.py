"""`armature check --settings` on a real server: it accepts settings that act, and finds each one that does not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pytest import MonkeyPatch

from armature.check import check_recipe
from armature.components.artifacts.images import encode_png
from armature.components.configuration import Recipe, load_recipe
from armature.components.configuration.stages import TerminalEvents, ThreadUnits, open_store
from armature.components.contracts.stages import StageContext
from armature.components.environments.generated import painter
from armature.components.inference import requests
from armature.components.inference.pool import ServerPool
from armature.components.models import load, lora
from armature.components.rl import run as rl_run
from armature.components.rl.open import open_run
from armature.components.rl.run import RLRun
from armature.components.rl.setting_checks import check_settings
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rl.trial import Trial, play_trial
from armature.components.rollouts import play
from armature.components.vlm import objectives
from tests.end_to_end.conftest import make
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FULL = (
    'model.freeze=["vision"]',
    "rollouts.max_staleness=1",
    "environment.args.correct_weight=2",
    "environment.args.format_weight=0.5",
    'trainer.objective={name="ppo", dual_clip=3}',
    'trainer.correction={mode="truncate", floor=0.5}',
    "trainer.kl_coefficient=0.05",
)
LORA = ('model.lora={targets=["q_proj", "fc1"], scope="all"}', "trainer.objective=cispo", "trainer.packing=true")


def recipe(store: Path, server: str, *overrides: str) -> Recipe:
    common = ("model.tiny.format.steps=20", "preflight.groups=2", f'machine.store="{store}"')
    return load_recipe("train-vlm/colors", (*common, f'machine.servers.endpoints=["{server}"]', *overrides))


@dataclass
class Opened:
    """An open run, its initial weights and its rollouts."""

    run: RLRun
    recipe: Callable[..., Recipe]
    weights: Path
    trial: Trial

    def results(self, overrides: tuple[str, ...], trial: Trial) -> dict[str, bool | None]:
        """Check settings with a trial, and return the results by setting."""
        settings = self.recipe(*overrides).settings_for(TrainVLMSettings)
        return {row.setting: row.acts for row in check_settings(settings, self.weights, trial, torch.device("cpu"))}


@pytest.fixture(scope="module")
def ours(shared_server, tmp_path_factory) -> Iterator[Callable[..., Recipe]]:
    """A function that returns the recipe with overrides, for the shared server."""
    with MonkeyPatch.context() as patched:
        patched.setenv("VLLM_API_KEY", shared_server.key)
        yield functools.partial(recipe, tmp_path_factory.mktemp("settings") / "store", shared_server.url)


@pytest.fixture(scope="module")
def opened(ours) -> Iterator[Opened]:
    inputs = {name: make(ours(*FULL), name) for name in ("model", "tasks")}
    machine, settings = ours().machine, ours(*FULL).settings_for(TrainVLMSettings)
    store = open_store(machine)
    workspace = store.workspace("train-vlm", "checked")
    context = StageContext(machine, TerminalEvents(), ThreadUnits(), workspace, store.images, "checked")
    with open_run(settings, inputs, context, store) as (run, _):
        yield Opened(run, ours, inputs["model"].path, play_trial(run))


def test_check_prints_the_table_and_fails(ours, monkeypatch, capsys):
    model = make(ours(), "model")

    async def give_weights() -> None:
        async with ServerPool(model.path, ours().sections["inference"], ours().machine, model.path.parent / "logs"):
            pass

    asyncio.run(give_weights())
    monkeypatch.setattr(load, "freeze", lambda *_: None)
    with refused("setting_does_not_act", "model.freeze"):
        check_recipe(ours(*FULL), configuration_only=False, with_settings=True)
    marks = {words[1]: words[0] for line in capsys.readouterr().out.splitlines() if len(words := line.split()) > 1}
    assert (marks["model.freeze"], marks["model.lora.targets"], marks["rollouts.seed"]) == ("✗", "-", "✓")


def test_settings_that_act_are_accepted(opened):
    full, adapted = (opened.results(overrides, opened.trial) for overrides in (FULL, LORA))
    unused = {"trainer.kl_coefficient", "model.freeze"}
    assert {name for name, acts in full.items() if acts is None} == {"model.lora.targets"}
    assert {name for name, acts in adapted.items() if acts is None} == unused
    assert all(acts for name, acts in full.items() if name != "model.lora.targets")
    # The rollouts were played with max_staleness = 1 and other weights of rewards than the second recipe has.
    assert {name for name, acts in adapted.items() if acts is False} == {"rollouts.max_staleness", "reward weights"}


def without_freezing(patch: MonkeyPatch, run: RLRun) -> None:
    patch.setattr(load, "freeze", lambda *_: None)


def other_targets(patch: MonkeyPatch, run: RLRun) -> None:
    select = lora.target_modules
    patch.setattr(lora, "target_modules", lambda *args: [name for name in select(*args) if name.endswith("q_proj")])


def without_kl(patch: MonkeyPatch, run: RLRun) -> None:
    patch.setattr(objectives, "kl_estimate", lambda logprobs, *_: logprobs * 0)


def without_clipping(patch: MonkeyPatch, run: RLRun) -> None:
    def unclipped(ratio: torch.Tensor, advantages: torch.Tensor, *_: float) -> objectives.PerToken:
        nothing = torch.zeros_like(ratio, dtype=torch.bool)
        return objectives.PerToken(-ratio * advantages, nothing, nothing)

    patch.setattr(objectives, "_clipped", unclipped)


def without_truncation(patch: MonkeyPatch, run: RLRun) -> None:
    weights = objectives.importance_weights
    wide = {"cap": 1e6, "floor": 0.0}
    patch.setattr(objectives, "importance_weights", lambda *args: weights(*args[:2], args[2].model_copy(update=wide)))


def blind_rollouts(patch: MonkeyPatch, run: RLRun) -> None:
    add, gray = play.SharedImages.add, encode_png(Image.new("RGB", (56, 56), (128, 128, 128)))
    patch.setattr(play.SharedImages, "add", lambda self, image: add(self, gray))


def unweighted_rewards(patch: MonkeyPatch, run: RLRun) -> None:
    patch.setattr(play, "_reward", lambda outcome, weights: float(sum(outcome.reward_parts.values())))


def without_overlap(patch: MonkeyPatch, run: RLRun) -> None:
    plan = rl_run.LoopPlan
    patch.setattr(rl_run, "LoopPlan", lambda *args: replace(plan(*args), max_staleness=0))


def request_without(key: str) -> Callable[[MonkeyPatch, RLRun], None]:
    def disable(patch: MonkeyPatch, run: RLRun) -> None:
        body = requests.request_body

        def without(*args: Any) -> dict[str, Any]:
            return {name: value for name, value in body(*args).items() if name != key}

        patch.setattr(requests, "request_body", without)

    return disable


def same_seed_for_all_runs(patch: MonkeyPatch, run: RLRun) -> None:
    seed = play.RolloutId.request_seed
    patch.setattr(play.RolloutId, "request_seed", lambda self, _, turn: seed(self, 0, turn))


def smaller_images(patch: MonkeyPatch, run: RLRun) -> None:
    environment: Any = run.parts.environment
    patch.setattr(environment, "_paint", painter(environment.settings.model_copy(update={"image_size": 28})))


@pytest.mark.parametrize(
    ("setting", "disable", "overrides"),
    [
        ("model.freeze", without_freezing, FULL),
        ("model.lora.targets", other_targets, (*FULL[1:], *LORA[:1])),
        ("trainer.kl_coefficient", without_kl, FULL),
        ("clipping of ratios", without_clipping, FULL),
        ("clipping of ratios", without_truncation, FULL),
        ("images", blind_rollouts, FULL),
        ("reward weights", unweighted_rewards, FULL),
        ("rollouts.max_staleness", without_overlap, FULL),
        ("sampling.temperature", request_without("temperature"), FULL),
        ("rollouts.seed", request_without("seed"), FULL),
        ("rollouts.seed", same_seed_for_all_runs, FULL),
        ("image_size", smaller_images, FULL),
    ],
)
def test_disabled_setting_is_found(opened, monkeypatch, setting, disable, overrides):
    learned = (without_freezing, other_targets, without_kl, without_clipping, without_truncation)
    disable(monkeypatch, opened.run)
    results = opened.results(overrides, opened.trial if disable in learned else play_trial(opened.run))
    assert [name for name, acts in results.items() if acts is False] == [setting]


def test_only_language_models_have_checks_of_settings():
    with refused("settings_not_checked"):
        load_recipe("train-vla/tiny").values.check_settings({}, print)
