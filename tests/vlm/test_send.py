"""Sending weights to servers: the tensors, the order of versions, and the connections; and delta versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.replies import Endpoint
from armature.components.inference.served.armature_served.deltas import DELTA, bring_to, words
from armature.components.models.molmo2 import to_hub
from armature.components.rollouts.batches.table import write_batch
from armature.components.vlm import worker as worker_module
from armature.components.vlm.worker import TrainerWorker
from tests.refusals import refused

from .conftest import LORA, Tiny, worker_of

SERVERS = [Endpoint("http://127.0.0.1:1", "key"), Endpoint("http://127.0.0.1:2", "key")]


class Recorder:
    """A weight sender that only records the tensors it gets. Any package may register such a sender."""

    made: list[Recorder]
    fails = False

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None:
        self.endpoints, self.sent, self.closed = endpoints, [], False
        Recorder.made.append(self)

    def send(self, parameters: dict[str, torch.Tensor]) -> None:
        if Recorder.fails:
            raise WeightSyncError("refused")
        assert not self.closed
        self.sent.append({name: tensor.clone() for name, tensor in parameters.items()})

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def recorded(monkeypatch) -> Iterator[None]:
    Recorder.made, Recorder.fails = [], False
    monkeypatch.setattr(worker_module, "WEIGHT_SENDERS", {"ipc": Recorder})
    yield


def make_worker(tiny: Tiny, folder: Path, transfer: str = "ipc", **model: Any) -> TrainerWorker:
    autocast = "none" if model.get("dtype") is None else "bf16"
    return worker_of(tiny, folder, {"learning_rate": 0.01, "autocast": autocast}, transfer, **model)


def ask(worker: TrainerWorker, **command: Any) -> Any:
    return worker.run(command, worker.check(command))


def send(worker: TrainerWorker, version: int, servers: list[Endpoint] = SERVERS) -> None:
    ask(worker, name="send", version=version, endpoints=[asdict(server) for server in servers])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2-vl", {}),
        ("qwen3-vl tied", {}),
        ("gemma3 tied", {"lora": LORA}),
        ("qwen2-vl", {"lora": LORA}),
        ("qwen2-vl", {"dtype": "bfloat16"}),
        ("llava", {}),
        ("gemma3", {}),
        ("internvl", {}),
        ("molmo2", {}),
        ("molmo2", {"lora": LORA}),
    ],
    ids=["full", "tied", "tied-lora", "lora", "bf16", "llava", "gemma3", "internvl", "molmo2", "molmo2-lora"],
)
def test_sent_tensors_equal_published_checkpoint(make_tiny, tmp_path, family, changes):
    tiny = make_tiny(family.removesuffix(" tied"), tied=family.endswith("tied"))
    worker = make_worker(tiny, tmp_path / "work", **changes)
    with torch.no_grad():
        for parameter in worker.learner.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    send(worker, 0)
    ask(worker, name="publish", version=0, folder=str(tmp_path / "out"))
    published = load_file(tmp_path / "out" / "model.safetensors")
    (sent,) = Recorder.made[0].sent
    if family == "molmo2":  # sent under the model's names, which vLLM's plug-in accepts like those in the files
        assert not any(name.startswith(("model.transformer.", "model.vision_backbone.")) for name in sent)
        sent = to_hub(sent, worker.learner.model.config)
    assert sent.keys() == published.keys()
    assert any(name.endswith("lm_head.weight") for name in sent) != family.endswith("tied")
    for name, tensor in published.items():
        assert tensor.dtype == sent[name].dtype
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=0)


def test_versions_are_sent_in_order_over_reused_connections(tiny, tmp_path):
    worker = make_worker(tiny, tmp_path / "work")
    send(worker, 0)
    batch = tmp_path / "batch"
    batch.mkdir()
    write_batch(batch, tiny.samples(4, seed=1))
    with refused("version_mismatch", "1", "0"):
        send(worker, 1)
    ask(worker, name="step", step=1, batch=str(batch))
    with refused("version_mismatch", "0", "1"):
        send(worker, 0)
    send(worker, 1)
    send(worker, 1)
    (only,) = Recorder.made
    before, after, again = only.sent
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after)

    send(worker, 1, SERVERS[:1])
    assert [sender.endpoints for sender in Recorder.made] == [SERVERS, SERVERS[:1]]
    Recorder.fails = True
    with pytest.raises(WeightSyncError):
        send(worker, 1, SERVERS[:1])
    Recorder.fails = False
    send(worker, 1, SERVERS[:1])
    send(worker, 1, [replace(SERVERS[0], joined=2)])
    assert [sender.closed for sender in Recorder.made] == [True, True, True, False]


def test_rejects_send_with_file_transfer(tiny, tmp_path):
    with refused("sender_not_needed", "'file'"):
        send(make_worker(tiny, tmp_path / "work", transfer="file"), 0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3-vl tied", {"dtype": "bfloat16"}),
        ("qwen2-vl", {}),
        ("gemma3 tied", {"lora": LORA}),
        ("internvl", {"dtype": "bfloat16"}),
        ("molmo2", {"dtype": "bfloat16"}),
    ],
    ids=["tied", "float32", "tied-lora", "untied", "molmo2"],
)
def test_delta_version_equals_published_checkpoint(make_tiny, tmp_path, family, changes):
    tiny = make_tiny(family.removesuffix(" tied"), tied=family.endswith("tied"))
    worker = make_worker(tiny, tmp_path / "work", transfer="delta", **changes)
    held = None
    for number in (1, 2, 3):
        with torch.no_grad():
            for parameter in worker.learner.model.parameters():
                parameter[torch.rand(parameter.shape) < 0.02] += 0.01
        folder = tmp_path / "versions" / f"{number:06d}"
        ask(worker, name="publish", folder=str(folder), form="delta")
        ask(worker, name="publish", folder=str(tmp_path / "whole"))
        assert (folder / DELTA).exists() == (number > 1)
        held = bring_to(folder, held)
        published = load_file(tmp_path / "whole" / "model.safetensors")
        assert held.tensors.keys() == published.keys()
        for name, tensor in published.items():
            assert held.tensors[name].dtype == tensor.dtype
            assert torch.equal(words(held.tensors[name]), words(tensor)), name
