"""Costs that nobody measured: from data sheets, sizes of the model, and the shares of them that are reached."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from components.contracts.settings import Settings
from components.planning.costs import Costs, FlowCosts, ServerCosts, TrainerCosts
from components.planning.geometry import ModelGeometry, key_value_bytes
from components.planning.gpus import Gpu

BENCHMARKS = "docs/benchmarks.md"


class Assumptions(Settings):
    """What is not on a data sheet. The descriptions say where each is from."""

    trainer_mfu: PositiveFloat = Field(
        0.2, description="assumed: of the bf16 FLOPs, without packing and compiled layers (0.20 measured on an H200)"
    )
    packed_mfu: PositiveFloat = Field(
        0.35, description="measured: with them 0.34 to 0.47 on an H200, " + BENCHMARKS + ", A step of the trainer"
    )
    prefill_mfu: PositiveFloat = Field(0.4, description="assumed: of the bf16 FLOPs for prompts and decoded tokens")
    memory_share: PositiveFloat = Field(0.7, description="assumed: of the memory bandwidth, when weights are read")
    network_share: PositiveFloat = Field(0.7, description="assumed: of NVLink and network, in collectives")
    pass_seconds: NonNegativeFloat = Field(0.003, description="assumed: of a server's forward pass besides the GPU's")
    hop_seconds: NonNegativeFloat = Field(5e-6, description="assumed: of one rank to the next in a ring")
    request_seconds: NonNegativeFloat = Field(
        0.0015, description="assumed: of the flow's event loop for a turn; 1.0 ms measured without HTTP"
    )
    image_seconds: NonNegativeFloat = Field(
        0.037 / 50, description="measured: 37 ms of event loop for a request of 50 images"
    )
    rollout_seconds: NonNegativeFloat = Field(
        1 / 5259, description="measured: 5,259 rows/s, " + BENCHMARKS + ", `make bench NAMES=batches`"
    )
    sync_seconds: NonNegativeFloat = Field(0.15, description="measured: 0.12 to 0.19 s by NCCL for a tiny model")
    tensor_seconds: NonNegativeFloat = Field(
        0.125 / 824, description="measured: 125 ms of the host to publish 824 tensors"
    )
    shared_bandwidth: PositiveFloat = Field(
        2e9, description="assumed: bytes/s of the folder that servers load weights from (14 GB to 24 in 168 s)"
    )


def estimated(
    sizes: ModelGeometry,
    gpu: Gpu,
    said: Assumptions,
    *,
    servers: int,
    gpus_per_server: int,
    ranks: int,
    transfer: str,
    fast_trainer: bool,
    slots: int,
) -> Costs:
    """Costs of a model of `sizes` on `gpu`.

    A forward pass is 2 operations for a weight and token, a backward pass 4, or 2 for weights that are not trained.
    A pass of a server reads all weights; one of the trainer gathers them twice and scatters the gradients once.

    Args:
        transfer: `machine.weight_transfer`.
        fast_trainer: with `trainer.packing` and compiled layers.
    """
    weights, server_flops = sizes.parameters, gpu.flops * gpus_per_server
    read = gpu.memory_bandwidth * said.memory_share * gpus_per_server
    link = (gpu.link if ranks <= gpu.per_node else gpu.network) * said.network_share
    gathered = 0.0 if ranks == 1 else (4 * weights + 4 * weights * sizes.trained) / link
    hops = 3 * (sizes.blocks + 1) * (ranks - 1) * said.hop_seconds
    mfu = said.packed_mfu if fast_trainer else said.trainer_mfu
    shared = 2 * weights / said.shared_bandwidth
    network = 2 * weights / (gpu.network * said.network_share)
    by_file = transfer in ("file", "delta")  # a delta takes less, which nobody measured on large models
    costs = Costs(
        servers=ServerCosts(
            pass_seconds=said.pass_seconds + sizes.estimate.server_weights / read,
            token_seconds=2 * weights / (server_flops * said.prefill_mfu),
            context_token_seconds=key_value_bytes(sizes) / read,
            slots=slots,
        ),
        trainer=TrainerCosts(
            token_seconds=(2 + 2 + 2 * min(1.0, sizes.trained)) * weights / (gpu.flops * mfu),
            gather_seconds=gathered + hops,
            update_seconds=16 * sizes.shard(ranks) * sizes.trained * 2 / (gpu.memory_bandwidth * said.memory_share),
        ),
        flow=FlowCosts(
            request_seconds=said.request_seconds,
            image_seconds=said.image_seconds,
            rollout_seconds=said.rollout_seconds,
        ),
        publish_seconds=shared if by_file else 0.0,
        sync_seconds=said.sync_seconds
        + (servers * shared if by_file else network)
        + len(sizes.shapes) * said.tensor_seconds,
    )
    return costs.model_copy(update={"sources": _sources(gpu, said, fast_trainer, by_file, ranks)})


def _sources(gpu: Gpu, said: Assumptions, fast_trainer: bool, by_file: bool, ranks: int) -> dict[str, str]:
    fields = type(said).model_fields

    def of(*names: str) -> str:
        return "; ".join(f"{name} = {getattr(said, name):.3g}, {fields[name].description}" for name in names)

    sheet = f"computed: sizes of the model, {gpu.source}"
    where = "NVLink" if ranks <= gpu.per_node else "the network between nodes"
    return {
        "servers.pass_seconds": f"{sheet}; {of('pass_seconds', 'memory_share')}",
        "servers.token_seconds": f"{sheet}; {of('prefill_mfu')}",
        "servers.context_token_seconds": f"{sheet}; {of('memory_share')}",
        "servers.slots": "assumed: vLLM's max_num_seqs, or as many as its cache has room for",
        "trainer.token_seconds": f"{sheet}; {of('packed_mfu' if fast_trainer else 'trainer_mfu')}",
        "trainer.gather_seconds": f"{sheet}, over {where}; {of('network_share', 'hop_seconds')}",
        "trainer.update_seconds": f"{sheet}; {of('memory_share')}",
        "flow.request_seconds": of("request_seconds"),
        "flow.image_seconds": of("image_seconds"),
        "flow.rollout_seconds": of("rollout_seconds"),
        "sync_seconds": of("sync_seconds", "tensor_seconds", "shared_bandwidth" if by_file else "network_share"),
    }
