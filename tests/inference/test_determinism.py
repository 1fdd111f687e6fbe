"""A request has the same bits whatever else servers compute, and where that cannot be promised, it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import EvaluationSamplingSettings, SamplingSettings, ServerSettings
from tests.builders import make_machine
from tests.inference.conftest import make_sampling
from tests.refusals import refused


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"max_model_len": 512, "max_images_per_prompt": 2, "dtype": "float32", **changes})


@pytest.mark.parametrize(
    ("changes", "machine"),
    [({}, {"servers__gpus": ((0,),)}), ({"dtype": "bfloat16"}, {}), ({"dtype": "float16"}, {"servers__gpus": ((0,),)})],
)
def test_rejects_determinism_that_cannot_be_guaranteed(checkpoint, tmp_path, changes, machine):
    with refused("determinism_impossible", "inference.deterministic"):
        ServerPool(checkpoint("w"), settings(deterministic=True, **changes), make_machine(**machine), tmp_path)
    ServerPool(checkpoint("v"), settings(**changes), make_machine(**machine), tmp_path)


@pytest.mark.parametrize("depends_on", ["", "others", "images", "reload", "server"])
def test_joined_server_must_pass_the_determinism_check(checkpoint, stand_ins, tmp_path, depends_on):
    """A server's bits may depend on concurrent requests, images in the same step, a reload, or the server itself."""
    servers = stand_ins(2)
    servers[1].depends_on = depends_on
    machine = make_machine(endpoints=tuple(server.url for server in servers), ready_timeout=5.0)

    async def join(**changes: Any) -> None:
        for server in servers:
            server.calls.clear()
        async with ServerPool(checkpoint(str(changes)), settings(**changes), machine, tmp_path) as pool:
            await pool.complete([{"role": "user", "content": "?"}], SamplingSettings(max_tokens=3), 1)

    asyncio.run(join())
    assert not any(server.calls.count("/pause") for server in servers)
    if depends_on:
        with refused("server_not_deterministic") as caught:
            asyncio.run(join(deterministic=True))
        assert caught.value.where in (servers[0].url, servers[1].url)
    else:
        asyncio.run(join(deterministic=True))


@pytest.mark.parametrize(("images", "asked"), [(0, 0), (1, 5)])
async def test_determinism_check_includes_images(checkpoint, stand_ins, tmp_path, images, asked):
    (server,) = stand_ins(1)
    machine = make_machine(endpoints=(server.url,), ready_timeout=5.0)
    changes = {"deterministic": True, "max_images_per_prompt": images}
    async with ServerPool(checkpoint("w"), settings(**changes), machine, tmp_path):
        pass
    assert (server.most_checked[True], server.most_checked[False]) == (asked, 5) and not server.paused


@pytest.mark.parametrize(
    "name", ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_training_sampling_has_no_biasing_setting(name):
    with refused("extra_forbidden", name):
        make_sampling(**{name: 1})


def test_evaluation_may_be_greedy():
    assert EvaluationSamplingSettings(temperature=0.0, max_tokens=8).temperature == 0.0
    with refused("value_error", "top_p", "top_k"):
        EvaluationSamplingSettings(temperature=0.0, max_tokens=8, top_p=0.9, top_k=20)
