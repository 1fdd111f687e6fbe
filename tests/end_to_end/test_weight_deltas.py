"""A real server receives what changed between versions of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from anyio.from_thread import start_blocking_portal

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import ProbeAnswer
from armature.components.inference.settings import EvaluationSamplingSettings, ServerSettings
from armature.components.inference.weights.pool import DELTA
from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import ModelSettings
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.training.ranks import Ranks
from armature.components.vlm.logprobs import Policy, answer_probe
from armature.components.vlm.publish import Publisher
from tests.builders import make_machine

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_killed_server_gets_the_current_adapter_version(tmp_path):
    """Tied embeddings; every sync is proved against the trainer's own log-probs, and so is the restart."""
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    tied = SMALL.model_copy(update={"tie_embeddings": True})
    start = make_tiny_checkpoint("qwen3-vl", tmp_path / "start", 0, tied)
    given_ = ModelSettings(source=str(start), dtype="float32")
    model, processor = load_model(start, given_), load_processor(start, given_)
    policy = Policy(model, logprobs="torch", temperature=1.0, chunk_tokens=64)
    publisher = Publisher(model, processor, tmp_path / "processor")
    messages = [{"role": "user", "content": "what is it?"}]
    server = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
    machine = make_machine(servers__python=PYTHON, ready_timeout=400, weight_transfer="delta")
    pool = ServerPool(start, server, machine, tmp_path / "logs")

    def version(number: int) -> tuple[Path, ProbeAnswer]:
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += (torch.rand_like(parameter) < 0.05) * 0.1 * torch.randn_like(parameter)
        folder = tmp_path / "weights" / f"{number:06d}"
        publisher.publish_delta(model, folder, Ranks())
        return folder, ProbeAnswer(answer_probe(policy, processor, pool.weights.probe), "float32")

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        for number in (1, 2, 3):
            folder, answer = version(number)
            assert (folder / DELTA).exists() == (number > 1)
            portal.call(pool.sync, folder, number, None, answer)
        replica = pool.replicas[0]
        replica.server.family()[0].kill()
        completion = portal.call(pool.complete, messages, EvaluationSamplingSettings(temperature=0.0, max_tokens=4), 0)
        assert completion.policy_version == 3 and pool.statistics.restarts == 1
        folder, _ = version(4)
        _, answer = version(5)
        with pytest.raises(WeightSyncError) as caught:
            portal.call(pool.sync, folder, 4, None, answer)
        assert caught.value.where == replica.name
