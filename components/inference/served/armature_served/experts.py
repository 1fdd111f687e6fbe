"""Experts on CPU servers: they are right after new weights were loaded in place, and are returned for each token.

vLLM (0.32) packs experts for its CPU kernels when it loads them first, and not when it loads them again. The kernel
then reads the new, plain weights as packed ones, and log-probs are nats off without a word in the log.
"""

from __future__ import annotations

from functools import cached_property, partial, wraps
from typing import Any

import numpy as np


def pack_experts_again() -> None:
    """Patch vLLM to pack experts whenever weights were loaded. Repeated calls have no further effect."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    theirs = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def set_up(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        again = self.moe_kernel is not None
        theirs(self, layer, *arguments, **options)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up


def return_experts_on_cpu() -> None:
    """Let servers on a CPU return the experts of each token, as vLLM's own `--enable-return-routed-experts` does.

    This is a stand-in: vLLM (0.32) does so only in its second model runner, which needs a GPU. Each layer's choices are
    kept by the token's slot in the KV cache, so a cached prompt has the experts that it was computed with. Repeated
    calls have no further effect.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner.sample_tokens, "returns_experts", False):
        return
    VllmConfig._verify_aux_output_compatibility = lambda self: None
    load, execute, sample = CPUModelRunner.load_model, CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    @wraps(load)
    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        if self.vllm_config.aux_output_config.enabled:
            self.chosen_experts = ChosenExperts(self)

    @wraps(execute)
    def execute_model(self: Any, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self.scheduled = scheduled
        return execute(self, scheduled, *arguments, **options)

    @wraps(sample)
    def sample_tokens(self: Any, *arguments: Any, **options: Any) -> Any:
        output = sample(self, *arguments, **options)
        if hasattr(self, "chosen_experts"):
            output.aux_output_connector_output = self.chosen_experts.of_step(self.scheduled)
        return output

    sample_tokens.returns_experts = True  # type: ignore[attr-defined]
    CPUModelRunner.load_model = load_model
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute_model, sample_tokens


class ChosenExperts:
    """The experts of each token in the KV cache of a model runner, by slot: (slots, layers, k)."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner, config = runner, runner.model_config
        experts, layers = config.get_num_experts(), config.get_total_num_hidden_layers()
        k = config.hf_text_config.num_experts_per_tok
        self.by_slot = np.zeros((0, layers, k), np.uint8 if experts <= 256 else np.uint16)
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._add, module.layer_id))

    @cached_property
    def group(self) -> tuple[int, str]:
        """The group of layers whose KV cache has a slot for each token, and one of the layers. Layers of linear
        attention, which have a state for a whole sequence, are in other groups."""
        from vllm.v1.kv_cache_interface import AttentionSpec

        groups = self.runner.kv_cache_config.kv_cache_groups
        number = next(n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, AttentionSpec))
        return number, groups[number].layer_names[0]

    def _add(self, layer: int, chosen: Any) -> None:
        """Store what a router has chosen, (tokens, k), for the tokens of the current forward pass."""
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        if not mapping:  # a profiling run
            return
        slots = mapping[self.group[1]][: len(chosen)].numpy()
        if (missing := int(slots.max()) + 1 - len(self.by_slot)) > 0:
            self.by_slot = np.pad(self.by_slot, ((0, missing), (0, 0), (0, 0)))
        self.by_slot[slots[slots >= 0], layer] = chosen.numpy()[slots >= 0]

    def of_step(self, scheduled: Any) -> dict[str, Any]:
        """Return the experts of the computed tokens of each scheduled request that were not returned yet."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        batch, outputs = self.runner.input_batch, dict[str, Any]()
        table = batch.block_table[self.group[0]]
        for request, start in scheduled.aux_output_connector_metadata.requests.items():
            row = batch.req_id_to_index[request]
            end = int(batch.num_computed_tokens_cpu[row]) + scheduled.num_scheduled_tokens[request]
            blocks, offsets = np.divmod(np.arange(start, end), table.block_size)
            slots = table.get_numpy_array()[row][blocks].astype(np.int64) * table.block_size + offsets
            outputs[request] = AuxRequestOutput(start, self.by_slot[slots])
        return outputs
