"""Updates of a policy: the weights they change, and independence of micro-batches, packing and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.source import open_sources
from armature.components.robots.datasets.stage import read_statistics
from armature.components.robots.imitation.data import Encoder, UpdateDataset
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import prepare, units
from armature.components.robots.imitation.robots import RobotsByTag, robots_of
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.training.ranks import Ranks
from armature.components.training.sharding import sharder
from tests.compiling import trace_only

from .conftest import CHUNK, policy_settings
from .settings import LORA, training_settings

Make = Callable[..., tuple[PolicyLearner, UpdateDataset]]


@pytest.fixture
def make(inputs: dict[str, Path]) -> Make:
    sources = open_sources(inputs["dataset"])
    statistics = read_statistics(inputs["statistics"], [source.tag for source in sources])

    def build(policy: dict[str, Any] | None = None, **training: Any) -> tuple[PolicyLearner, UpdateDataset]:
        chosen, settings = policy_settings(**(policy or {})), training_settings(**training)
        robots: RobotsByTag = robots_of(inputs["policy"], chosen, sources, statistics)
        parts = robots.saved()
        model = load_model(inputs["policy"], parts)
        with torch.no_grad():  # initial modulations are 0 and stop gradients
            for module in model.action_expert.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.add_(
                        0.05 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1))
                    )
        prepare(model, settings, chosen.semantics)
        encoder = Encoder(robots.processors(), parts.config, chosen, settings)
        return PolicyLearner(model, settings, LossPlan.of(chosen)), UpdateDataset(
            Mixture(sources, CHUNK, 0), encoder, 0, 1
        )

    return build


LOSSES = ("loss", "loss/flow", "loss/cross_entropy", "loss/z")


@pytest.mark.parametrize(
    "spread",
    [
        {"micro_batch_size": 3},
        {"micro_batch_size": 6, "packing": {"max_row_tokens": 250, "max_row_examples": 4}},
        {
            "micro_batch_size": 4,
            "packing": {"max_row_tokens": 190, "max_row_examples": 2},
            "gradient_checkpointing": True,
        },
    ],
    ids=["accumulated", "packed", "packed-checkpointed"],
)
def test_update_does_not_depend_on_micro_batches_and_packing(make: Make, spread: dict[str, Any]) -> None:
    both = {"action_mode": "both"}
    one, updates = make(both, batch_size=6, micro_batch_size=6, adam_epsilon=1e-2)
    other, spread_updates = make(both, batch_size=6, adam_epsilon=1e-2, **spread)
    for update in (1, 2):
        first, second = one.step(updates[update]), other.step(spread_updates[update])
        for name in (*LOSSES, "grad_norm", "grad_norm/vlm", "grad_norm/action_expert"):
            assert second[name] == pytest.approx(first[name], rel=1e-5), name
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_packing_needs_fewer_rows(make: Make) -> None:
    plain, _ = make(), None
    packed = make(packing={"max_row_tokens": 400, "max_row_examples": 4}, micro_batch_size=4)
    (micro,) = packed[1][1]
    rows = [len(each.batch.input_ids) for each in plain[1][1]]
    assert (sum(rows), len(micro.batch.input_ids)) == (4, 1)
    assert micro.tokens == sum(each.tokens for each in plain[1][1])


def test_ranks_split_an_update_into_equally_many_micro_batches(make: Make) -> None:
    _, updates = make(batch_size=6, micro_batch_size=2)
    whole = [ids for micro in updates[3] for ids in actions_of(micro)]
    shares = [UpdateDataset(updates.mixture, updates.encoder, rank, 2)[3] for rank in (0, 1)]
    assert [len(share) for share in shares] == [2, 2]
    assert sorted(actions for share in shares for micro in share for actions in actions_of(micro)) == sorted(whole)


def actions_of(micro: Any) -> list[list[float]]:
    return [actions.flatten().tolist() for actions in micro.batch.actions]


@pytest.mark.parametrize(
    ("training", "trained"),
    [
        ({"mode": "full"}, {"vlm", "vit", "connector", "action_expert"}),
        ({"mode": "lora", "lora": LORA}, {"lora", "action_expert"}),
        ({"mode": "lora_expert", "lora": LORA}, {"lora"}),
        ({"mode": "expert"}, {"action_expert"}),
    ],
    ids=["full", "lora", "lora_expert", "expert"],
)
def test_mode_trains_only_its_parts(make: Make, training: dict[str, Any], trained: set[str]) -> None:
    learner, updates = make(**training)
    before = {name: value.detach().clone() for name, value in learner.model.named_parameters()}
    for update in (1, 2):
        learner.step(updates[update])
    changed = {name for name, value in learner.model.named_parameters() if not torch.equal(value, before[name])}

    def part(name: str) -> str:
        return "lora" if "lora_" in name else name.split(".")[0] if "expert" in name else _vlm_part(name)

    assert {part(name) for name in changed} == trained
    assert not any(name.endswith("embed_tokens.embedding") for name in changed)
    assert any(name.endswith("embed_tokens.new_embedding") for name in changed) == (training["mode"] == "full")
    if training["mode"] == "lora_expert":
        assert any("action_expert" in name for name in changed)


def _vlm_part(name: str) -> str:
    return "vit" if "vision_tower" in name else "connector" if "projector" in name or "new_emb" in name else "vlm"


def test_update_with_non_finite_gradient_is_skipped_and_counted(make: Make) -> None:
    learner, updates = make()
    learner.step(updates[1])
    before = {name: value.detach().clone() for name, value in learner.model.named_parameters()}
    moments = {p: state["exp_avg"].clone() for p, state in learner.optimizer.state.items()}
    micro, *others = updates[2]
    assert micro.batch.actions is not None
    broken = replace(micro, batch=replace(micro.batch, actions=micro.batch.actions * float("inf")))
    report = learner.step([broken, *others])
    assert report["updates_skipped"] == 1 and learner.steps_done == 2
    assert all(torch.equal(value, before[name]) for name, value in learner.model.named_parameters())
    assert all(torch.equal(learner.optimizer.state[p]["exp_avg"], moment) for p, moment in moments.items())
    assert learner.step(updates[3])["updates_skipped"] == 1


def test_each_parameter_group_is_clipped_separately(make: Make) -> None:
    """If only the action expert exceeds the bound, the other groups are updated as without a bound."""
    free, updates = make(max_grad_norm=1e9, adam_epsilon=1.0)
    report = free.step(updates[1])
    bound = (report["grad_norm/vlm"] * report["grad_norm/action_expert"]) ** 0.5
    assert report["grad_norm/vlm"] < bound < report["grad_norm/action_expert"]
    clipped, _ = make(max_grad_norm=bound, adam_epsilon=1.0)
    clipped.step(updates[1])
    same = {
        name: torch.equal(a, b)
        for (name, a), (_, b) in zip(free.model.named_parameters(), clipped.model.named_parameters(), strict=True)
        if a.requires_grad
    }
    assert all(equal for name, equal in same.items() if name.startswith("vlm."))
    assert not all(equal for name, equal in same.items() if name.startswith("action_expert."))


def test_outputs_of_sharded_units_are_tensors_that_fsdp_finds(make: Make) -> None:
    """Without a tensor in a unit's output, FSDP does not gather the unit's weights for the backward pass.

    On a GPU the backward pass then reads freed memory.
    """
    learner, updates = make(policy={"action_mode": "both"})
    outputs: dict[str, list[object]] = {}
    names = {id(module): name for name, module in learner.model.named_modules()}
    for module, _ in units(learner.model, "float32"):
        name = names[id(module)]
        module.register_forward_hook(lambda _m, _i, output, name=name: outputs.update({name: tree_leaves(output)}))
    learner.step(updates[1])
    assert "" in outputs and "vlm.model.language_model" in outputs
    for name, leaves in outputs.items():
        assert leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves), name


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.long)])
@trace_only()
def test_compiled_layers_train_like_plain_ones(make: Make, sharded: bool) -> None:
    both = {"action_mode": "both"}
    common = {"batch_size": 6, "micro_batch_size": 3, "gradient_checkpointing": True, "adam_epsilon": 1e-2}
    plain, updates = make(both, **common)
    compiled, _ = make(both, torch_compile=not sharded, **common)
    with one_rank() if sharded else nullcontext():
        if sharded:
            settings = compiled.settings.model_copy(update={"torch_compile": True})
            weights = {name: value.clone() for name, value in compiled.model.state_dict().items()}
            shard = sharder(Ranks(), 1, partial(units, precision="float32"), weights, cast_inputs=False)
            compiled = PolicyLearner(compiled.model, settings, compiled.plan, Ranks(), shard)
        for update in (1, 2):
            first, second = plain.step(updates[update]), compiled.step(updates[update])
            for name in (*LOSSES, "grad_norm", "grad_norm/vlm", "grad_norm/action_expert"):
                assert second[name] == pytest.approx(first[name], rel=1e-4), name


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
