"""Ranks that share packed rows (context parallelism): the same results as one rank, and less memory on each."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.families.family import FAMILIES
from armature.components.models.context_parallel import (
    ContextParallel,
    assign_encoders,
    feature_exchange,
    images_encoded_by,
)
from armature.components.models.settings import LoraSettings
from armature.components.training.processes import private_folder
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import FeatureCache
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import Tiny, trainer_settings
from .context_ranks import Case, kept_for_backward, packed, policy_of, results
from .test_packing import conversations

SIZES = {"hidden_size": 128, "heads": 4, "key_value_heads": 2}
"""Sizes of a model with two key-value heads, so that four ranks have to repeat each of these heads."""
SHARED = [
    name for name in FAMILIES if not name.startswith("qwen3.5")
]  # ranks cannot share the state of its linear attention
CASES = (*SHARED, *("text", "five tokens", "adapters in the tower", "frozen tower", "recomputed", "windows", "long"))
ON_FOUR = ("qwen2.5-vl", "qwen3-vl", "pixtral", "molmo2", "text", "five tokens", "adapters in the tower", "long")
EVERYWHERE = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj", "qkv"), scope="all")
WINDOW = 12


@dataclass(frozen=True)
class Ran:
    """The results that several ranks computed for one case."""

    ranks: list[Any]
    """For each rank a tuple of its results.

    They are the names of parameters with a gradient, the bytes saved for the backward pass, log-probs and entropies.
    """
    gradient: dict[str, torch.Tensor]
    """Gradients by parameter name, summed over the ranks."""


def long_row(tiny: Tiny) -> list[Sample]:
    """Return one sample: a conversation that text extends to 1,536 tokens."""
    sample = conversations(tiny)[0]
    more = 1536 - len(sample.input_ids)
    padding = {
        "input_ids": np.resize(sample.input_ids[-4:], more),
        "loss_mask": np.ones(more, bool),
        "behavior_logprobs": np.full(more, -6.0, np.float32),
        "policy_versions": np.zeros(more, np.int32),
        "advantages": np.full(more, 0.5, np.float32),
    }
    longer = {name: np.concatenate([getattr(sample, name), values]) for name, values in padding.items()}
    return [replace(sample, **longer)]


def _cut(sample: Sample, tokens: int) -> Sample:
    arrays = {name: value[-tokens:] for name, value in vars(sample).items() if isinstance(value, np.ndarray)}
    return replace(sample, **arrays)


@pytest.fixture(scope="module")
def cases(make_tiny) -> dict[str, Case]:
    made = {}
    for family in SHARED:
        tiny = make_tiny(family, **SIZES)
        made[family] = Case(tiny.folder, conversations(tiny))
    qwen = made["qwen2.5-vl"]
    text = [sample for sample in qwen.samples if not sample.images]
    other = text[0].input_ids.copy()
    other[-6:] = other[-7]
    return made | {
        "text": replace(qwen, samples=[*text, replace(text[0], input_ids=other)]),
        "five tokens": replace(qwen, samples=[_cut(text[0], 5)]),
        "adapters in the tower": replace(qwen, model={"lora": EVERYWHERE}),
        "frozen tower": replace(qwen, model={"freeze": ("vision", "projector")}),
        "recomputed": replace(qwen, model={"gradient_checkpointing": True}),
        "windows": replace(made["gemma3"], window=WINDOW),
        "long": Case(qwen.folder, long_row(make_tiny("qwen2.5-vl", **SIZES))),
    }


class Together:
    """Computes cases on several ranks, which are processes forked from one running program."""

    def __init__(self, root: Path, program: subprocess.Popen[str]) -> None:
        self.root, self.program = root, program

    def run(self, cases: dict[str, Case], ranks: int) -> None:
        file = self.root / "cases.pickle"
        file.write_bytes(pickle.dumps(cases))
        request = [ranks, str(private_folder(self.root / "rendezvous")), str(file)]
        self.program.stdin.write(json.dumps(request) + "\n")
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "0\n", (self.root / "log").read_text()[-6000:]

    def read(self, name: str, ranks: int) -> Ran:
        return Ran(*torch.load(self.root / f"{name} on {ranks}.pt"))


@pytest.fixture(scope="module")
def together(cases, tmp_path_factory) -> Iterator[Together]:
    root, pipe = tmp_path_factory.mktemp("context"), subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.vlm.context_ranks"]
    with (
        (root / "log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as program,
    ):
        made = Together(root, program)
        made.run(cases, 2)
        made.run({name: cases[name] for name in ON_FOUR}, 4)
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_ranks_equal_one_rank_row_by_row(name, cases, together, make_tiny, tmp_path):
    case = cases[name]
    tiny = make_tiny(name if name in FAMILIES else "gemma3" if name == "windows" else "qwen2.5-vl", **SIZES)
    policy = policy_of(case, tiny, Ranks())
    features = FeatureCache(tiny.collator, tiny.images, tmp_path)
    rows = [(tiny.collator.collate_features([sample], features), None) for sample in case.samples]
    alone, gradient, _ = results(policy, rows, kept_for_backward)
    norm = torch.stack([value.norm() for value in gradient.values()]).norm()
    for ranks in (2, 4) if name in ON_FOUR else (2,):
        ran = together.read(name, ranks)
        for reached, _, logprobs, entropies in ran.ranks:
            torch.testing.assert_close(logprobs, torch.cat(alone[::2]), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(entropies, torch.cat(alone[1::2]), rtol=1e-6, atol=1e-6)
            assert reached == sorted(gradient), "FSDP needs each gradient on all ranks"
        gaps = {one: (ran.gradient[one] - value).norm() for one, value in gradient.items()}
        assert torch.stack([*gaps.values()]).norm() < 1e-6 * norm
        for one, value in gradient.items():
            assert gaps[one] < 5e-6 * value.norm() + 1e-8 * norm, one


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ON_FOUR])
def test_some_image_of_shared_rows_crosses_rank_border(name, cases, make_tiny):
    """The test above is only meaningful if this is so."""
    tiny = make_tiny(name, **SIZES)
    batch, packing = packed(cases[name], tiny, policy_of(cases[name], tiny, Ranks()), Ranks())
    ids = batch.input_ids[packing.rows, packing.columns]
    places = (ids == tiny.collator.image_token_id).nonzero()[:, 0]
    images = places.split([packing.image_tokens[image] for image in packing.images])
    borders = [*accumulate(ContextParallel(0, 4, None).lengths(len(ids)))][:-1]
    assert any(image[0] < border <= image[-1] for image in images for border in borders)
    assert len(ids) < 0.7 * int(batch.attention_mask.sum())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_saved_memory_falls_with_number_of_ranks(cases, together, make_tiny):
    case, tiny = cases["long"], make_tiny("qwen2.5-vl", **SIZES)
    policy = policy_of(case, tiny, Ranks())
    _, _, alone = results(policy, [packed(case, tiny, policy, Ranks())], kept_for_backward)
    for ranks in (2, 4):
        most = max(saved for _, saved, *_ in together.read("long", ranks).ranks)
        print(f"bytes kept for the backward pass: {alone:,} on one rank, {most:,} on each of {ranks}")
        assert alone / ranks < most < 1.15 * alone / ranks


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_exchange_gives_each_image_token_its_feature(tokens, data):
    """The exchange is simulated with lists in place of a network."""
    ranks = data.draw(st.integers(1, 4))
    shown = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=8))
    wanted = [(image, at) for image in shown for at in range(tokens[image])]
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(wanted), max_size=len(wanted)))
    places = torch.tensor([gap + 1 for gap in gaps]).cumsum(0) - 1
    n = int(places[-1]) + 1 + data.draw(st.integers(0, 3))
    chosen = assign_encoders(tokens, ranks)
    groups = [ContextParallel(rank, ranks, None) for rank in range(ranks)]
    plans = [feature_exchange(group, shown, tokens, chosen, places, n) for group in groups]
    sent = []
    for rank, plan in enumerate(plans):
        images = images_encoded_by(rank, chosen, tokens)
        assert images
        features = [(image, at) for image in images for at in range(tokens[image])]
        rows = [features[row] for row in plan.rows]
        ends = [0, *accumulate(plan.sends)]
        sent.append([rows[a:b] for a, b in pairwise(ends)])
    features_in_order = []
    for rank, plan in enumerate(plans):
        received = [row for sender in range(ranks) for row in sent[sender][rank]]
        assert plan.receives == tuple(len(sent[sender][rank]) for sender in range(ranks))
        features_in_order += [received[at] for at in plan.order]
    assert features_in_order == wanted


def test_images_are_divided_among_ranks_by_tokens():
    assert assign_encoders([9, 1, 5, 4, 1], 2) == (0, 0, 1, 1, 1)
    assert assign_encoders([7], 3) == (0,)


def shared_learner(tiny: Tiny, size: int, **changes: Any) -> Learner:
    ranks = Ranks(size=size, context=ContextParallel(0, size, None))
    return Learner(tiny.model(), trainer_settings(**changes), temperature=1.0, ranks=ranks)


def test_rejects_unsupported_context_parallelism(tiny):
    with pytest.raises(ConfigurationError) as caught:
        shared_learner(tiny, 4, packing=True)
    assert caught.value.where == "machine.trainer.context_parallel = 4"
    with refused("sharing_needs_packing", "trainer.packing"):
        shared_learner(tiny, 2)
    with refused("value_error", "context_parallel = 2", "3"):
        make_machine(trainer__processes=3, trainer__context_parallel=2)


def test_rejects_fewer_tokens_than_ranks(cases, make_tiny):
    case, tiny = cases["five tokens"], make_tiny("qwen2.5-vl", **SIZES)
    ranks = Ranks(size=8, context=ContextParallel(0, 8, None))
    with pytest.raises(DataError) as caught:
        packed(case, tiny, policy_of(case, tiny, Ranks()), ranks)
    assert "machine.trainer.context_parallel" in caught.value.where
