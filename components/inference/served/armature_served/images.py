"""Images that are encoded one at a time, on a server whose answers must not depend on what else it computes.

vLLM (0.26 to 0.32) encodes the images of all requests that it schedules in one step as one batch. The patch embeddings
of most vision towers are plain layers of torch, which multiplies with MKL on x86, and MKL chooses a kernel by the
number of rows: on a processor of Intel's with AVX-512, four patches of 588 values have other bits among those of three
images than alone. Layers that vLLM itself packs, for oneDNN, are not concerned.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import Any


def encode_one_by_one() -> None:
    """Encode each image alone where `VLLM_CPU_ATTN_SPLIT_KV=0` asks for answers that do not depend on the batch.

    May be called repeatedly.
    """
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV") != "0":
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the one for CPU is made of it

    together = GPUModelRunner._execute_mm_encoder
    if hasattr(together, "__wrapped__"):
        return

    @wraps(together)
    def one_by_one(self: Any, scheduler_output: Any) -> list[Any]:
        outputs: list[Any] = []
        for request, images in scheduler_output.scheduled_encoder_inputs.items():
            for image in images:
                alone = replace(scheduler_output, scheduled_encoder_inputs={request: [image]})
                outputs += together(self, alone)
        return outputs

    GPUModelRunner._execute_mm_encoder = one_by_one
