"""Rollouts and their training: identical bytes for any schedule of play, ratios of 1, and better odds afterwards."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.errors import DataError
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.policies.family import family
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import FlowLikelihood
from armature.components.robots.rl.loader import ActionChunkBatch, ActionChunkLoader, _bytes, loaded_ahead
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunk, ActionChunkSample, with_advantage, write_rollouts
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings


def play(
    loaded: LoadedPolicy, images: ImageStore, processes: Sequence[Kitchen], step: int = 1, **changes: Any
) -> list[ActionChunk]:
    settings = rollout_settings(**changes)
    policy = family(loaded.settings.family).player(
        loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1
    )
    collector = Collector(settings, policy, processes, images, lambda done, total: None)
    return collector.collect(plan_step(settings, TASKS, step), step, step - 1, bootstrap=False).answers


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()])


def learner(loaded: LoadedPolicy, images: ImageStore, **changes: Any) -> RobotRLLearner:
    model = copy.deepcopy(loaded.model)
    values = {"max_steps": 3, "micro_batch_size": 7, "learning_rates": {"action_expert": 1e-3}}
    settings = RobotRLTrainerSettings.model_validate(values | changes)
    prepare(model, settings, loaded.settings.semantics)
    plan = family(loaded.settings.family).sampling_plan(loaded.settings, loaded.config)
    load = ActionChunkLoader(loaded.processor(), images, packing=settings.packing)
    return RobotRLLearner(model, settings, FlowLikelihood(plan, 0.5), load)


def judged(answers: Sequence[ActionChunk]) -> list[ActionChunkSample]:
    """Return the chunks with advantages set, alternately 1 and -1."""
    return [with_advantage(answer, 1.0 - 2.0 * (number % 2)) for number, answer in enumerate(answers)]


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
    with refused("too_many_episodes_failed", "3 of 8"):
        play(loaded, images, [Kitchen(range(1, 100))])


def test_chunks_record_executed_actions_and_episode_end(answers: list[ActionChunk]) -> None:
    by_episode: dict[str, list[ActionChunk]] = {}
    for answer in answers:
        by_episode.setdefault(answer.episode_id, []).append(answer)
    assert len(by_episode) == 8
    for episode in by_episode.values():
        steps = sum(each.executed for each in episode)
        assert [each.chunk for each in episode] == list(range(len(episode)))
        assert [each.done for each in episode] == [False] * (len(episode) - 1) + [True]
        assert all(each.executed == 3 for each in episode[:-1])
        assert episode[-1].truncated == (episode[-1].reward == 0.0)
        assert steps == 8 or not episode[-1].truncated
        assert all(len(each.logprobs) == len(each.actions) == 7 * each.executed for each in episode)
    assert {each.flow_step for each in answers} == {0, 1, 2, 3}
    assert len({each.images[0].sha256 for each in answers}) > 1
    assert {episode[-1].reward for episode in by_episode.values()} == {0.0, 1.0}


@pytest.mark.parametrize("ratio", ["chunk", "dimension"])
def test_ratios_start_at_one_and_follow_advantages(
    ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = judged(answers)
    trainer = learner(loaded, images, ratio=ratio)
    sampled = np.array([each.logprobs.sum() for each in samples])
    before = np.array(trainer.score(samples))
    assert np.abs(np.expm1(before - sampled)).max() < 1e-5
    alone = learner(loaded, images, micro_batch_size=1)  # as rows are sampled on a CPU
    assert np.abs(np.array(alone.score(samples)) - sampled).max() < 1e-12
    report = trainer.step(samples)
    assert report["importance_ratio"] == pytest.approx(1.0, abs=1e-5) and report["kl"] < 1e-9
    weights = np.ones(len(samples)) if ratio == "chunk" else np.array([len(each.logprobs) for each in samples])
    advantages = np.array([each.advantage for each in samples])
    assert report["loss"] == pytest.approx(-float(weights @ advantages / weights.sum()), abs=1e-5)
    change = np.array(trainer.score(samples)) - before
    assert float(advantages @ change) > 0


def test_ratios_are_one_only_if_both_sides_use_8_bits(tmp_path: Path, images: ImageStore) -> None:
    calm_policy(tmp_path, dtype="bfloat16")
    plain, fp8 = (load_policy(tmp_path / "checkpoint") for _ in range(2))
    fp8.model.quantize_text("here")
    samples = judged(play(fp8, images, [Kitchen()]))
    sampled = np.array([each.logprobs.sum() for each in samples])
    differences = [
        np.abs(np.array(learner(one, images, mode="expert", micro_batch_size=1).score(samples)) - sampled).max()
        for one in (fp8, plain)
    ]
    assert differences[0] < 1e-12 and differences[1] > 1e-3


def test_score_keeps_only_one_micro_batch_graph(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    sizes: list[int] = []

    class Kept:
        alive = 0

        def __init__(self, value: torch.Tensor) -> None:
            self.value, Kept.alive = value.detach(), Kept.alive + value.nbytes
            sizes.append(Kept.alive)

        def __del__(self) -> None:
            Kept.alive -= self.value.nbytes

    trainer, samples = learner(loaded, images, micro_batch_size=2), judged(answers)[:6]
    peaks = []
    for scored in (samples[:2], samples):
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda saved: saved.value):
            trainer.score(scored)
        peaks.append(max(sizes))
        sizes.clear()
        assert Kept.alive == 0
    assert 0 < peaks[1] <= peaks[0] * 1.01


def test_micro_batches_and_epochs_sum_over_the_same_chunks(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = judged(answers)
    reports = [learner(loaded, images, micro_batch_size=width).step(samples) for width in (3, 100)]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-4)
    several = learner(loaded, images, samples_per_update=5, epochs=2)
    updates = several._updates(11, number=1)
    assert sorted(map(len, updates)) == [3, 3, 4, 4, 4, 4]
    assert sorted(row for rows in updates[:3] for row in rows) == [*range(11)] and updates[:3] != updates[3:]
    assert several.step(samples)["updates"] == 2 * -(-len(samples) // 5)
    assert several.step([])["updates"] == 0 and several.steps_done == 2


def test_target_kl_ends_the_step_before_a_distant_update(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples, plan = judged(answers), {"samples_per_update": 5, "epochs": 2}
    whole, near, far = (learner(loaded, images, target_kl=most, **plan) for most in (0.0, 1e-9, 1e3))
    reports = [each.step(samples) for each in (whole, near, far)]
    count = len(whole._updates(len(samples), 1))
    assert [report["updates"] for report in reports] == [count, 1, count]
    assert [report["updates_dropped"] for report in reports] == [0, count - 1, 0]
    assert reports[1]["kl"] > 1e-9  # KL of the chunks computed before the step ended
    computed = [report["answers_per_second"] * report["timing/train_s"] for report in reports]
    first_two = sum(map(len, whole._updates(len(samples), 1)[:2]))
    assert computed == pytest.approx([2 * len(samples), first_two, 2 * len(samples)])
    first = learner(loaded, images, **plan)
    first._updates = lambda count, number: whole._updates(count, number)[:1]
    first.step(samples)
    for one, other in ((near, first), (far, whole)):
        for name, weight in other.model.state_dict().items():
            assert torch.equal(one.model.state_dict()[name], weight), name
    assert all(weight.grad is None for weight in near.model.parameters())  # nothing is left of what was not made


def test_loads_exactly_one_part_ahead(loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]) -> None:
    load, samples = ActionChunkLoader(loaded.processor(), images), judged(answers)
    parts = [samples[start : start + 2] for start in range(0, 8, 2)]
    begun: SimpleQueue[int] = SimpleQueue()

    def recorded_load(part: Sequence[ActionChunkSample]) -> ActionChunkBatch:
        begun.put(parts.index(part))
        if part is parts[3]:
            raise DataError("an image is lost", code="image_lost")
        return load(part)

    with closing(loaded_ahead(recorded_load, parts)) as coming:
        first_batches = [next(coming)]
        assert [begun.get(timeout=10) for _ in range(2)] == [0, 1] and begun.empty()  # none of them is asked for
        first_batches += [next(coming), next(coming)]
        for one, part in zip(first_batches, parts, strict=False):
            assert torch.equal(one.batch.pixel_values, load(part).batch.pixel_values)
            assert torch.equal(one.advantages, load(part).advantages)
        with refused("image_lost"):
            next(coming)


def test_loader_caches_encoded_chunks_up_to_its_limit(loaded: LoadedPolicy, tmp_path: Path) -> None:
    images = ImageStore(tmp_path / "images")
    samples, processor = judged(play(loaded, images, [Kitchen()])), loaded.processor()
    load, fresh = ActionChunkLoader(processor, images), ActionChunkLoader(processor, images)
    first = [load([sample]) for sample in samples]
    narrow, none = (
        ActionChunkLoader(processor, images, kept_bytes=count * _bytes(load._example(samples[0]))) for count in (2, 0)
    )
    for each in (narrow, none):
        each(samples)
    shutil.rmtree(images.root)
    again = load(samples[::-1])  # in another order and batch
    expected = torch.cat([part.batch.pixel_values for part in first[::-1]])
    assert torch.equal(again.batch.pixel_values, expected)
    unknown = replace(samples[0], language="Another task."), replace(samples[0], state=samples[0].state + 1)
    for loader, asked in (
        *((load, [each]) for each in unknown),  # whatever its episode is called
        (fresh, samples[:1]),
        (narrow, samples[-3:]),
        (none, samples[-1:]),
    ):
        with pytest.raises(DataError) as error:
            loader(asked)
        assert Path(error.value.where).stem in {ref.sha256 for each in asked for ref in each.images}


def test_rejects_chunks_of_another_policy(loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]) -> None:
    load = ActionChunkLoader(loaded.processor(), images)
    samples = judged(answers)
    load.refuse(samples, "here")
    for before in (samples[2].before[:-1], np.full_like(samples[2].after, np.nan)):
        vars(samples[2])["before"] = before
        with refused("answer_not_trainable", "here, row 2", samples[2].episode_id):
            load.refuse(samples, "here")
    good = samples[0]
    nowhere, nothing = np.full_like(good.state, np.nan), np.zeros(0)
    for changes, value in (
        ({"flow_step": None}, "None"),
        ({"flow_step": 4}, "4"),
        ({"flow_step": -1}, "-1"),
        ({"executed": 0, "logprobs": nothing}, "0 of 4"),
        ({"executed": 5, "logprobs": np.zeros(35)}, "5 of 4"),
        ({"images": good.images[:1]}, "1 images of 2"),
        ({"state": nowhere}, ""),
        ({"images": (replace(good.images[0], sha256="b" * 64), good.images[1])}, "bbbbbbbbbbbb"),
        ({"images": (replace(good.images[0], sha256="b"), good.images[1])}, "'b'"),
    ):
        with refused("answer_not_trainable", "here, row 1", value):
            load.refuse([good, replace(good, **changes)], "here")


@pytest.mark.parametrize("ratio", ["chunk", "dimension"])
def test_behavior_cloning_term_uses_logprobs_of_solved_episodes(
    ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples = judged(answers)
    plain, cloning = (learner(loaded, images, ratio=ratio, bc_coefficient=weight) for weight in (0.0, 0.3))
    ends = {each.episode_id: not each.truncated for each in answers if each.done}
    solved = np.array([ends[each.episode_id] for each in samples])
    assert 0 < solved.sum() < len(solved)
    ratios = len(samples) if ratio == "chunk" else sum(len(each.logprobs) for each in samples)
    expected = -sum(each.logprobs.sum() for each, good in zip(samples, solved, strict=True) if good) / ratios
    before = np.array(cloning.score(samples))
    with_it, without = cloning.step(samples), plain.step(samples)
    assert with_it["bc/loss"] == pytest.approx(expected, rel=1e-5) and "bc/loss" not in without
    assert with_it["loss"] == pytest.approx(without["loss"] + 0.3 * expected, rel=1e-5)
    change = [(np.array(one.score(samples)) - before)[solved].sum() for one in (cloning, plain)]
    assert change[0] > change[1]


def test_adapters_start_at_the_policy_and_change_it(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples, rates = judged(answers), dict.fromkeys(("vlm", "vit", "connector", "action_expert"), 1e-3)
    adapted = {"mode": "lora_expert", "lora": {"rank": 2}, "learning_rates": rates}
    trainer = learner(loaded, images, **adapted)
    sampled = np.array([each.logprobs.sum() for each in samples])
    assert np.abs(np.expm1(np.array(trainer.score(samples)) - sampled)).max() < 1e-5
    assert all("lora_" in name for name, p in trainer.model.named_parameters() if p.requires_grad)
    assert trainer.step(samples)["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    moved = np.array(trainer.score(samples)) - sampled
    assert float(np.array([each.advantage for each in samples]) @ moved) > 0
