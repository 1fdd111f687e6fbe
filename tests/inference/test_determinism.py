"""A request has the same bits whatever else servers compute, and where that cannot be promised, it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import ConfigurationError, ServerError
from components.contracts.machine import Machine
from components.inference.pool import ServerPool
from components.inference.settings import ServerSettings

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
REQUESTS = 24


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"max_model_len": 512, "max_images_per_prompt": 2, "dtype": "float32", **changes})


@pytest.mark.parametrize(
    ("changes", "machine"),
    [({}, {"server_gpus": ((0,),)}), ({"dtype": "bfloat16"}, {}), ({"dtype": "float16"}, {"server_gpus": ((0,),)})],
)
def test_it_is_refused_where_it_cannot_be_promised(
    checkpoint: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], machine: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="the same seed would not give the same run"):
        ServerPool(checkpoint("w"), settings(deterministic=True, **changes), Machine(**machine), tmp_path)
    ServerPool(checkpoint("v"), settings(**changes), Machine(**machine), tmp_path)


@pytest.mark.parametrize(("difference", "refused"), [(0.0, False), (1e-7, True)])
def test_a_joined_server_has_to_prove_it(
    checkpoint: Callable[..., Path],
    stand_ins: Callable[[int], list[Any]],
    tmp_path: Path,
    difference: float,
    refused: bool,
) -> None:
    (server,) = stand_ins(1)
    server.depends_on_others = difference
    machine = Machine(endpoints=(server.url,), ready_timeout=5.0)

    async def join(**changes: Any) -> None:
        async with ServerPool(checkpoint(str(changes)), settings(**changes), machine, tmp_path):
            pass

    asyncio.run(join())
    if refused:
        with pytest.raises(ServerError, match="the same seed would not give the same run"):
            asyncio.run(join(deterministic=True))
    else:
        asyncio.run(join(deterministic=True))
