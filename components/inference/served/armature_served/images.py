"""Make vLLM on a CPU encode each image alone, so that the features of an image do not depend on the batch.

vLLM (0.26 to 0.32) encodes the images of all requests that it schedules in one step as one batch. The patch embeddings
of most vision towers are plain torch layers. On x86, torch multiplies matrices with MKL, which chooses a kernel by the
number of rows. Example: on an Intel processor with AVX-512, the embeddings of one image (four patches of 588 values)
have different bits when the image is in a batch of three images than when it is alone. Layers that vLLM itself packs
for oneDNN do not have this problem.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import Any


def encode_one_by_one() -> None:
    """Patch vLLM to encode each image alone if the environment has `VLLM_CPU_ATTN_SPLIT_KV=0`.

    With this variable a user asks for results that do not depend on the batch. Repeated calls have no further effect.
    """
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV") != "0":
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU model runner is a subclass

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
