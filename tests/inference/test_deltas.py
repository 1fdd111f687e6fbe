"""Versions of weights as what changed, restored bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from armature.components.inference.command import server_command
from armature.components.inference.served.armature_served import deltas
from armature.components.inference.served.armature_served.deltas import (
    HostWeights,
    bring_to,
    decode,
    encode,
    write_delta,
)
from armature.components.inference.settings import ServerSettings
from armature.components.inference.weights.pool import DELTA
from armature.components.training.ranks import Ranks
from armature.components.vlm.publish import DeltaSeries
from tests.builders import make_machine

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x3F80)
"""Special bf16 bit patterns: zeros, the smallest denormals, infinities, NaN with three payloads, and the number 1."""


@given(st.lists(st.integers(0, 200_000), unique=True).map(sorted))
def test_delta_positions_are_restored_from_distances(places):
    coded = encode(torch.tensor(places, dtype=torch.int64))
    assert coded.dtype == torch.uint8 and decode(coded).tolist() == places
    assert len(coded) <= len(places) + (places[-1] // 255 if places else 0)


def raw(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def of_bits(bits: Any, dtype: torch.dtype, shape: Any) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    made.view(-1).view(torch.uint8).copy_(torch.from_numpy(bits))
    return made


def random_tensors(random: np.random.Generator) -> dict[str, Tensor]:
    """Return tensors of every dtype with random bits, by name. Some of them are scalar, empty or not contiguous."""
    made = {}
    for number, dtype in enumerate(DTYPES):
        shape = [(), (0, 3), (7,), (5, 3), (2, 300)][int(random.integers(5))]
        size = int(np.prod(shape)) * dtype.itemsize
        bits = random.integers(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
        made[f"layer.{number}"] = of_bits(bits, dtype, shape)
    made["turned"] = torch.randn(300, 4, generator=torch.Generator().manual_seed(int(random.integers(99)))).bfloat16()
    return made


def walked(tensors: dict[str, Tensor], random: np.random.Generator, share: float) -> dict[str, Tensor]:
    """Return a copy of the tensors in which a `share` of the bytes is changed, and some elements are `SPECIAL`
    values."""
    new = {}
    for name, tensor in tensors.items():
        bits = np.frombuffer(bytes(raw(tensor)), np.uint8).copy()
        changed = random.random(bits.size) < share
        bits[changed] ^= 1 if tensor.dtype == torch.bool else random.integers(1, 256, changed.sum(), dtype=np.uint8)
        new[name] = of_bits(bits, tensor.dtype, tensor.shape)
    values = new["turned"].view(torch.int16)
    values[random.integers(300, size=5), random.integers(4, size=5)] = torch.tensor(
        random.choice(SPECIAL, 5).astype(np.uint16).view(np.int16)
    )
    return new


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0.0, 0.02, 0.5, 1.0]), min_size=1, max_size=4))
def test_every_version_is_restored_bit_for_bit(tmp_path_factory, seed, shares):
    folder, random = tmp_path_factory.mktemp("walk"), np.random.default_rng(seed)
    (folder / "0").mkdir()
    versions = [random_tensors(random)]
    save_file(versions[0], folder / "0" / "model.safetensors")
    held = HostWeights.read(folder / "0")
    for number, share in enumerate(shares, 1):
        versions.append(walked(versions[-1], random, share))
        (folder / str(number)).mkdir()
        # as trainers have some of their weights
        given_ = versions[-1] | {"turned": versions[-1]["turned"].t().contiguous().t()}
        write_delta(folder / str(number), held, str(number - 1), given_.items())
    step: HostWeights | None = None
    for number, version in enumerate(versions):
        step = bring_to(folder / str(number), step)  # one after the other
        for restored in (step, bring_to(folder / str(number), None)):  # and as a server that joins
            assert {name: raw(tensor) for name, tensor in restored.tensors.items()} == {
                name: raw(tensor) for name, tensor in version.items()
            }
            assert {name: (t.dtype, t.shape) for name, t in restored.tensors.items()} == {
                name: (t.dtype, t.shape) for name, t in version.items()
            }
    assert step is not None and step.digest == held.digest


@pytest.fixture
def series(tmp_path) -> Callable[..., list[dict[str, Tensor]]]:
    """Return a function that writes versions 0 to `count` of some weights as folders, and returns their tensors.

    Version 0 is a whole checkpoint. Each further version is a delta that changes a fiftieth of the tensor `w`.
    """

    def make(count: int) -> list[dict[str, Tensor]]:
        random, weights = np.random.default_rng(0), {"w": torch.randn(200, 100).bfloat16(), "v": torch.randn(50)}
        (tmp_path / "0").mkdir()
        save_file(weights, tmp_path / "0" / "model.safetensors")
        made, held = [weights], HostWeights.read(tmp_path / "0")
        for number in range(1, count + 1):
            new = {name: tensor.clone() for name, tensor in made[-1].items()}
            new["w"].view(-1)[random.choice(20_000, 400, replace=False)] += 1
            (tmp_path / str(number)).mkdir()
            write_delta(tmp_path / str(number), held, str(number - 1), new.items())
            made.append(new)
        return made

    return make


def test_rejects_delta_of_other_weights(series, tmp_path):
    series(2)
    held = HostWeights.read(tmp_path / "0")
    with pytest.raises(ValueError):
        deltas.apply_delta(tmp_path / "2", held)
    for tensor in (torch.zeros(3), held.tensors["w"].clone()):  # of another shape; without v
        with pytest.raises(ValueError):
            write_delta(tmp_path, held, "0", [("w", tensor)])


@pytest.mark.parametrize("part", ["values", "distances", "the version before"])
def test_damaged_bit_is_detected(part, series, tmp_path):
    series(1)
    file = tmp_path / ("0/model.safetensors" if part == "the version before" else f"1/{DELTA}")
    tensors = load_file(file)
    facts = deltas.read_facts(tmp_path / "1")
    damaged = tensors["w gaps" if part == "distances" else "w"].view(-1).view(torch.uint8)
    damaged[20] ^= 1
    save_file(tensors, file, metadata=facts)
    with pytest.raises(ValueError):
        bring_to(tmp_path / "1", None)


def test_reads_only_needed_deltas(series, tmp_path, monkeypatch):
    versions, applied = series(4), []
    apply = deltas.apply_delta
    monkeypatch.setattr(deltas, "apply_delta", lambda folder, held: (applied.append(folder.name), apply(folder, held)))
    held = bring_to(tmp_path / "2", None)
    assert bring_to(tmp_path / "2", held) is held and applied == ["1", "2"]
    assert bring_to(tmp_path / "4", held) is held and applied == ["1", "2", "3", "4"]
    back = bring_to(tmp_path / "1", held)  # an older one: from the checkpoint
    assert back is not held and applied[4:] == ["1"]
    assert torch.equal(back.tensors["w"], versions[1]["w"])


def test_delta_series_restarts_with_a_checkpoint(tmp_path):
    series, ranks, random = DeltaSeries(), Ranks(), np.random.default_rng(0)
    weights = {"w": torch.randn(200, 100).bfloat16()}
    kinds = ""
    for number in range(1, 12):
        weights["w"].view(-1)[random.choice(20_000, 2_000, replace=False)] += 1
        folder = tmp_path / f"{number:06d}"
        if not series.add(folder, weights.items(), ranks):
            kinds += "c"
            folder.mkdir(exist_ok=True)
            (folder / DELTA).unlink(missing_ok=True)
            save_file(weights, folder / "model.safetensors")
            series.begin(folder, ranks)
        else:
            kinds += "d"
        restored = bring_to(folder, None)  # a server that is started now
        assert torch.equal(restored.tensors["w"], weights["w"])
        before = tmp_path / f"{number - 1:06d}"
        assert number == 1 or bring_to(before, None)  # and one that is started before the sync
    assert kinds == "cddddddcddd"  # 6 x 15 % of the size, and the seventh would be too much
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:06d}" for number in range(8, 12)]
    assert not series.add(tmp_path / "000004", weights.items(), ranks)  # as after a resume


def test_server_has_the_route_of_the_plug_in(checkpoint):
    settings = ServerSettings(max_model_len=512, dtype="float32")
    command = server_command(checkpoint("w"), settings, make_machine(weight_transfer="delta"), port=1, gpus=())
    assert command[command.index("--worker-extension-cls") + 1] == "armature_served.versions.Versions"
    assert "--weight-transfer-config" not in command
    assert DELTA == deltas.DELTA
