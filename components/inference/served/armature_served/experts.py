"""Make experts right after vLLM on a CPU loaded new weights in place.

vLLM (0.32) packs experts for its CPU kernels when it loads them first, and not when it loads them again. The kernel
then reads the new, plain weights as packed ones, and log-probs are nats off without a word in the log.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


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
