"""After a sync a server's log-probs of a probe are the trainer's own, not only another server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from armature.components.inference.command import vocabulary
from armature.components.inference.monitor import EJECT_AFTER
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import LIKELIEST, ProbeAnswer, make_probe
from armature.components.models.load import load_model
from armature.components.models.tiny import make_tiny_checkpoint
from tests.refusals import codes, refused
from tests.vlm.conftest import model_settings


def answer_of(pool: ServerPool, version: str, dtype: str = "float32", off: float = 0.0) -> ProbeAnswer:
    """Return the answer that a stand-in server with the weights `version` gives to the pool's probe. `off` is added to
    the greatest log-prob after the image."""
    value = -float(sum(version.encode()) % 97)
    text = np.full(len(pool.weights.probe.tokens) - 1, value)
    top = value - np.arange(LIKELIEST)
    top[0] += off
    return ProbeAnswer(np.concatenate([text, top]).astype(np.float32), dtype)


def sync(pool: ServerPool, weights: Path, make_answer: Callable[[ServerPool], ProbeAnswer | None]) -> None:
    async def work() -> None:
        async with pool:
            await pool.sync(weights, 1, answer=make_answer(pool))

    asyncio.run(work())


def test_rejects_servers_that_differ_from_the_trainer(stand_ins, make_pool, checkpoint):
    pool = make_pool(stand_ins(2), checkpoint("a"))
    with refused("served_weights_differ", "1 nats", -1, -2, "components/inference/served"):
        sync(pool, checkpoint("b"), lambda pool: answer_of(pool, "c"))  # ord("b") - 97 is 1


@pytest.mark.parametrize(
    ("changes", "dtype", "off", "passes"),
    [
        ({}, "float32", 0.05, True),  # a joined server may be on a GPU: 1e-2 over 147 values
        ({}, "float32", 0.2, False),
        ({}, "bfloat16", 1.0, True),
        ({}, "bfloat16", 2.0, False),
        ({"quantization": "fp8"}, "bfloat16", 5.0, True),
        ({"quantization": "fp8"}, "bfloat16", 7.0, False),
        ({"sync_tolerance": 1e-3}, "bfloat16", 0.1, False),
    ],
)
def test_tolerance_depends_on_dtypes(stand_ins, make_pool, checkpoint, changes, dtype, off, passes):
    pool = make_pool(stand_ins(1), checkpoint("a"), **changes)
    if passes:
        sync(pool, checkpoint("b"), lambda pool: answer_of(pool, "b", dtype, off))
        return
    with refused("served_vision_weights_differ"):
        sync(pool, checkpoint("b"), lambda pool: answer_of(pool, "b", dtype, off))


def test_sixteen_bits_may_choose_other_experts(stand_ins, make_pool, checkpoint):
    folders = [checkpoint(name) for name in "ab"]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"text_config": {"num_experts": 8}}))
    pool = make_pool(stand_ins(1), folders[0])
    sync(pool, folders[1], lambda pool: answer_of(pool, "b", "bfloat16", 3.0))
    pool = make_pool(stand_ins(1), folders[0])
    with refused("served_vision_weights_differ"):
        sync(pool, folders[1], lambda pool: answer_of(pool, "b", "float32", 0.2))


async def test_returning_server_must_match_the_trainer(join, checkpoint):
    servers, pool = join(2)
    async with pool:
        await pool.sync(checkpoint("b"), 1, answer=answer_of(pool, "b"))
        replica = pool.replicas[1]
        servers[1].version = "other"
        servers[1].misbehave("sync nothing")  # it says that it loaded what it was given
        replica.failures = EJECT_AFTER
        replica.suspect.set()
        async with asyncio.timeout(10):
            while replica.given_up is None:
                await asyncio.sleep(0.02)
        assert codes(replica.given_up) == {"served_weights_differ"}
        assert not replica.ready and pool.replicas[0].ready


async def test_server_that_loaded_nothing_is_named(stand_ins, make_pool, checkpoint):
    (server,) = servers = stand_ins(1)
    with refused("served_weights_old", "version 1"):
        async with make_pool(servers, checkpoint("a")) as pool:
            await pool.sync(checkpoint("b"), 1, answer=answer_of(pool, "b"))
            server.misbehave("sync nothing")
            await pool.sync(checkpoint("c"), 2, answer=answer_of(pool, "c"))


@pytest.mark.parametrize(("changed", "code"), [(False, "served_vision_weights_differ"), (True, "served_weights_old")])
def test_servers_that_see_images_differently_are_not_said_to_be_old(stand_ins, make_pool, checkpoint, changed, code):
    """Only the server has answered for the first version. The update changed all weights, or none."""
    (server,) = servers = stand_ins(1)
    server.misbehave("sync nothing")
    version = "b" if changed else server.version
    with refused(code):
        sync(make_pool(servers, checkpoint("a")), checkpoint("b"), lambda pool: answer_of(pool, version, off=0.5))


def test_invalid_probe_answer_is_an_error(stand_ins, make_pool, checkpoint):
    (server,) = servers = stand_ins(1)
    server.misbehave("sync no probe")
    with refused("probe_logprobs_missing", server.url):
        sync(make_pool(servers, checkpoint("a")), checkpoint("b"), lambda pool: answer_of(pool, "b"))


@pytest.mark.parametrize("vocabulary", [130, 200, 150_000, 2**31 - 1])
def test_probe_has_many_sampleable_tokens(vocabulary):
    probe = make_probe(vocabulary, (3, 5), 511, images=True)
    assert probe == make_probe(vocabulary, (3, 5), 511, images=True)
    assert len(set(probe.tokens)) == len(probe.tokens) == 128 and not {3, 5} & set(probe.tokens)
    assert max(probe.tokens) < vocabulary
    assert probe.pil_image().size == (64, 48)
    assert len(make_probe(vocabulary, (), 15, images=False).tokens) == 15
    assert len(make_probe(20, (3, 5), 511, images=False).tokens) == 18


@pytest.mark.parametrize("family", ["qwen2-vl", "gemma3", "molmo2"])
def test_probe_rows_equal_the_model(family, tmp_path):
    folder = make_tiny_checkpoint(family, tmp_path / "model", seed=0)
    settings = model_settings()
    model = load_model(folder, settings)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert vocabulary(folder) == (head.weight.shape[0], embedding.weight.shape[0])
