"""Adapters that a real server holds beside the weights it started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.command import ServedAdapters
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import ProbeAnswer
from armature.components.inference.settings import EvaluationSamplingSettings, ServerSettings
from tests.builders import make_machine

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
MESSAGES = [{"role": "user", "content": "what is it?"}]


class Trained:
    """A tiny model with LoRA adapters, in place of a trainer. `version` gives the adapters random weights and publishes
    them, and `answer` is its answer to the probe."""

    def __init__(self, folder: Path) -> None:
        from armature.components.models.load import load_model, load_processor
        from armature.components.models.settings import LoraSettings, ModelSettings
        from armature.components.models.tiny import SMALL, make_tiny_checkpoint
        from armature.components.vlm.logprobs import Policy
        from armature.components.vlm.publish import Publisher

        self.folder = folder
        sizes = SMALL.model_copy(update={"tie_embeddings": True})
        self.start = make_tiny_checkpoint("qwen2.5-vl", folder / "start", 0, sizes)
        lora = LoraSettings(rank=5, targets=("all",), scope="all", served_as="adapter")
        settings = ModelSettings(source=str(self.start), dtype="float32", lora=lora)
        self.model: Any = load_model(self.start, settings)
        self.processor = load_processor(self.start, settings)
        self.publisher = Publisher(self.model, self.processor, folder / "processor")
        self.policy = Policy(self.model, logprobs="torch", temperature=1.0, chunk_tokens=64)

    def version(self, number: int) -> Path:
        from armature.components.training.ranks import Ranks

        torch.manual_seed(number)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1)
        self.publisher.publish_adapter(self.model, self.folder / "weights" / f"{number:06d}", Ranks())
        return self.folder / "weights" / f"{number:06d}"

    def answer(self, pool: ServerPool) -> ProbeAnswer:
        from armature.components.vlm.logprobs import answer_probe

        return ProbeAnswer(answer_probe(self.policy, self.processor, pool.weights.probe), "float32")

    def logprobs(self, prompt: list[int], sampled: list[int], forbidden: tuple[int, ...]) -> Any:
        """Return the log-probs of the `sampled` tokens after the `prompt`, computed by the model in this process."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([prompt + sampled])).logits[0]
        logits[:, list(forbidden)] = -torch.inf
        return logits.log_softmax(-1)[-len(sampled) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy()


@pytest.fixture
def trained(tmp_path) -> Trained:
    return Trained(tmp_path / "trained")


def test_published_adapter_equals_the_peft_delta(trained):
    from armature.components.models.lora import merged_weights

    first, second = trained.version(1), trained.version(2)
    assert trained.version(3).exists() and second.exists() and not first.exists()
    folder = trained.version(4)
    facts = json.loads((folder / "adapter_config.json").read_text())
    saved = load_file(folder / "adapter_model.safetensors")
    base, merged = trained.model.get_base_model().state_dict(), dict(merged_weights(trained.model))
    layers = {name.rpartition(".lora_")[0] for name in saved}
    assert layers and facts["r"] == 5
    for layer in layers:
        delta = facts["lora_alpha"] / facts["r"] * saved[f"{layer}.lora_B.weight"] @ saved[f"{layer}.lora_A.weight"]
        name = layer.removeprefix("base_model.model.")
        torch.testing.assert_close(base[f"{name}.base_layer.weight"] + delta, merged[f"{name}.weight"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_restarted_server_answers_with_the_current_adapter(trained, tmp_path):
    """Adapters in the vision tower too, tied embeddings, a rank that vLLM rounds up."""
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    machine = make_machine(servers__python=PYTHON, ready_timeout=400)
    pool = ServerPool(trained.start, SETTINGS, machine, tmp_path / "logs", adapters=ServedAdapters(5, vision=True))
    greedy = EvaluationSamplingSettings(temperature=0.0, max_tokens=6)

    def same(completion: Any, version: int) -> None:
        prompt, sampled = completion.prompt_token_ids.tolist(), completion.token_ids.tolist()
        expected = trained.logprobs(prompt, sampled, pool.forbidden_token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.policy_version == version

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        replica = pool.replicas[0]
        for version in (11, 12):
            folder = trained.version(version)
            portal.call(pool.sync, folder, version, None, trained.answer(pool))  # which proves it, images included
            same(portal.call(pool.complete, MESSAGES, greedy, 0), version)
        assert pool.repeatability.promised  # with the first adapter too
        replica.server.family()[0].kill()
        same(portal.call(pool.complete, MESSAGES, greedy, 1), 12)
        assert pool.statistics.restarts == 1
        trained.version(13)
        with pytest.raises(WeightSyncError) as caught:
            portal.call(pool.sync, folder, 13, None, trained.answer(pool))
        assert caught.value.where == replica.name
