"""Many tensors in one buffer, as vLLM takes them apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.components.inference.replies import Endpoint
from armature.components.inference.weights.trainer import ServerControl, aligned, buckets, describe, largest, pack, size

VLLM = Path(__file__).parents[2] / ".venv-vllm/lib"
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), min_size=1, max_size=30), st.integers(1, 200))
def test_servers_unpack_identical_buckets(shapes, most):
    parameters = {f"w{i}": torch.randint(0, 99, (3, n)).to(dtype).t() for i, (dtype, n) in enumerate(shapes)}
    ordered = aligned(parameters)
    assert ordered.keys() == parameters.keys()
    reported = describe(ordered)
    buffer = torch.empty(largest(ordered, most), dtype=torch.uint8)
    sent = iter(buckets(ordered, most))
    result: dict[str, torch.Tensor] = {}
    waiting: list[tuple[str, torch.dtype, list[int], int]] = []

    def receive() -> None:
        """Unpack the next buffer in the way vLLM's workers do."""
        flat = pack(next(sent), buffer)
        sizes = [bytes_ for *_, bytes_ in waiting]
        assert len(flat) == sum(sizes) and len(flat) <= len(buffer)
        for (name, dtype, shape, _), part in zip(waiting, flat.split(sizes), strict=True):
            result[name] = part.clone().view(dtype).view(shape) if part.numel() else torch.empty(shape, dtype=dtype)
            assert part.storage_offset() % dtype.itemsize == 0
        waiting.clear()

    for name, dtype_name, shape in zip(reported["names"], reported["dtype_names"], reported["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        waiting.append((name, dtype, shape, torch.Size(shape).numel() * dtype.itemsize))
        if sum(bytes_ for *_, bytes_ in waiting) > most:
            receive()
    if waiting:
        receive()
    assert next(sent, None) is None
    assert all(torch.equal(result[name], tensor) for name, tensor in parameters.items())
    assert sum(map(size, parameters.values())) == sum(map(size, result.values()))


def test_transfer_uses_the_routes_of_the_vllm_version():
    """Read the source of the installed vLLM to see which routes accept `packed`."""
    folder = next(VLLM.glob("python*/site-packages/vllm"), None)
    if folder is None:
        pytest.skip("needs .venv-vllm: make environments")
    version = re.search(r"version = '([^']*)'", (folder / "_version.py").read_text())
    assert version is not None and version[1].startswith("0.32.")
    source = (folder / "distributed/weight_transfer/ipc_engine.py").read_text()
    init, update = (
        source.split(f"class IPCWeightTransfer{kind}Info")[1].split("\n\n\n")[0] for kind in ("Init", "Update")
    )
    assert "packed: bool" in init and "packed: bool" not in update and "tensor_sizes" in update


def test_other_vllm_versions_get_single_tensors(stand_ins):
    servers = stand_ins(2)
    with ServerControl([Endpoint(one.url, one.key) for one in servers], 5) as control:
        for versions, way in (
            (("0.26.0", "0.26.1"), "update"),
            (("0.32.0", "0.32.0+cpu"), "init"),
            (("0.26.0", "0.32.0"), None),
            (("0.29.0", "0.29.0"), None),
        ):
            for server, version in zip(servers, versions, strict=True):
                server.vllm = version
            assert control.packing() == way
