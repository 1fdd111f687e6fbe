"""Costs that nobody measured: from data sheets, sizes of the model, and the shares of them that are reached."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from armature.components.contracts.settings import Settings
from armature.components.models.settings import ModelSettings
from armature.components.planning.costs import Costs, FlowCosts, ServerCosts, TrainerCosts
from armature.components.planning.geometry import ModelGeometry, key_value_bytes
from armature.components.planning.gpus import Gpu
from armature.components.vlm.settings import TrainerSettings

BENCHMARKS = "docs/benchmarks.md"
STEP, SYNC, TWO = (
    BENCHMARKS + ", A step of the trainer",
    BENCHMARKS + ", New weights to a server",
    BENCHMARKS + ", Two GPUs, and less memory",
)
Transfer = Literal["file", "delta", "nccl", "ipc", "adapter"]
Mfu = Literal["trainer_mfu", "packed_mfu", "compiled_mfu", "kept_mfu"]
COLLECTIVES = 3
"""Of a block in a micro-batch: its weights are gathered forward and backward, its gradients are scattered."""


class Assumptions(Settings):
    """What is not on a data sheet. The descriptions say where each is from."""

    trainer_mfu: PositiveFloat = Field(
        0.26, description="fitted: of the bf16 FLOPs without trainer.packing, two models on an H200"
    )
    packed_mfu: PositiveFloat = Field(0.4, description="fitted: packed, not compiled, one case on an H200, " + STEP)
    compiled_mfu: PositiveFloat = Field(
        0.49, description="fitted: packed and compiled, three cases on an H200, " + STEP
    )
    kept_mfu: PositiveFloat = Field(
        0.64, description="fitted: packed and compiled, activations kept, three cases on an H200, " + STEP
    )
    eager_layer_seconds: NonNegativeFloat = Field(
        0.395 / 68 / 3,
        description="measured: of a pass through a layer besides its tokens: three micro-batches in place of one took "
        "0.79 s more, " + STEP,
    )
    compiled_layer_seconds: NonNegativeFloat = Field(
        0.115 / 68 / 3,
        description="measured: the same, compiled: what a line through three cases of one micro-batch leaves at no "
        "tokens, " + STEP,
    )
    sharded_loss: NonNegativeFloat = Field(
        2 * 1775 / 3225 - 1,
        description="measured: more computing beside NCCL, 1,775 ms for half of 3,225 on two H200s, " + TWO,
    )
    collective_seconds: NonNegativeFloat = Field(
        (0.117 - 0.042) / 207,
        description="measured: of a collective that nothing hides, on two H200s: 117 ms besides computing, less the 42 "
        "ms of one, in 207, " + TWO,
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
    sync_seconds: NonNegativeFloat = Field(0.15, description="measured: 0.12 to 0.19 s of a sync of a tiny model")
    tensor_seconds: NonNegativeFloat = Field(
        0.125 / 824, description="measured: 125 ms of the host to publish 824 tensors"
    )
    load_bandwidth: PositiveFloat = Field(
        12e9, description="measured: bytes/s of vLLM's loader and the probes after it, on an H100, " + SYNC
    )
    write_bandwidth: PositiveFloat = Field(
        0.56e9, description="measured: bytes/s of a checkpoint that is written, on a disk, " + SYNC
    )
    shared_bandwidth: PositiveFloat = Field(
        2e9, description="assumed: bytes/s of the folder that servers load weights from (14 GB to 24 in 168 s)"
    )
    delta_bandwidth: PositiveFloat = Field(
        4e9, description="measured: bytes/s of weights that are compared, and those that are put together, " + SYNC
    )
    delta_share: PositiveFloat = Field(0.03, description="measured: moved of weights of which 2 % changed, " + SYNC)
    adapter_publish: NonNegativeFloat = Field(
        0.28, description="measured: 0.22 and 0.34 s to publish adapters, " + SYNC
    )
    adapter_load: NonNegativeFloat = Field(0.94, description="measured: 0.94 s to load 60 MB of adapters, " + SYNC)


def estimated(
    sizes: ModelGeometry,
    gpu: Gpu,
    said: Assumptions,
    *,
    servers: int,
    gpus_per_server: int,
    ranks: int,
    transfer: Transfer,
    mfu: Mfu,
    slots: int,
) -> Costs:
    """Costs of a model of `sizes` on `gpu`.

    A forward pass is 2 operations for a weight and token, a backward pass 4, or 2 for weights that are not trained;
    what is computed again is counted in the share of the FLOPs that is reached. A pass of a server reads all weights;
    one of the trainer gathers them twice and scatters the gradients once. Nothing hides the gathering of what is in no
    block, which comes first, and the scattering of its gradients, which comes last.

    Args:
        mfu: which of `Assumptions` the trainer reaches; see `mfu_of`.
    """
    weights, server_flops = sizes.parameters, gpu.flops * gpus_per_server
    read = gpu.memory_bandwidth * said.memory_share * gpus_per_server
    passes = 2 if mfu == "kept_mfu" else 3
    layer = said.compiled_layer_seconds if mfu in ("compiled_mfu", "kept_mfu") else said.eager_layer_seconds
    trained, loss, gathered, exposed = min(1.0, sizes.trained), 0.0, 0.0, 0.0
    if ranks > 1:
        collectives = COLLECTIVES * (sizes.blocks + 1)
        byte_seconds = (ranks - 1) / ranks / (gpu.collective(ranks) * said.network_share)
        gathered = (4 + 4 * trained) * weights * byte_seconds + collectives * (ranks - 1) * said.hop_seconds
        exposed = (2 + 4 * trained) * sizes.root * byte_seconds + collectives * said.collective_seconds
        loss = said.sharded_loss
    publish, sync, of_sync = _sync(sizes, gpu, said, servers, transfer)
    costs = Costs(
        servers=ServerCosts(
            pass_seconds=said.pass_seconds + sizes.estimate.server_weights / read,
            token_seconds=2 * weights / (server_flops * said.prefill_mfu),
            context_token_seconds=key_value_bytes(sizes) / read,
            slots=slots,
        ),
        trainer=TrainerCosts(
            token_seconds=(4 + 2 * trained) * weights * (1 + loss) / (gpu.flops * getattr(said, mfu)),
            micro_batch_seconds=passes * sizes.blocks * layer,
            gather_seconds=gathered,
            exposed_seconds=exposed,
            update_seconds=16 * sizes.shard(ranks) * sizes.trained * 2 / (gpu.memory_bandwidth * said.memory_share),
        ),
        flow=FlowCosts(
            request_seconds=said.request_seconds,
            image_seconds=said.image_seconds,
            rollout_seconds=said.rollout_seconds,
        ),
        publish_seconds=publish,
        sync_seconds=sync,
    )
    return costs.model_copy(update={"sources": _sources(gpu, said, mfu, of_sync, ranks)})


def mfu_of(model: ModelSettings, trainer: TrainerSettings) -> Mfu:
    """What was measured of a trainer like this."""
    if not trainer.packing:
        return "trainer_mfu"
    if not trainer.torch_compile:
        return "packed_mfu"
    return "compiled_mfu" if model.gradient_checkpointing else "kept_mfu"


def _sync(
    sizes: ModelGeometry, gpu: Gpu, said: Assumptions, servers: int, transfer: Transfer
) -> tuple[float, float, tuple[str, ...]]:
    """Seconds to publish, while servers go on; seconds of the sync; and the assumptions that they rest on."""
    moved, tensors = 2 * sizes.parameters, len(sizes.shapes) * said.tensor_seconds
    if transfer == "adapter":
        return said.adapter_publish, said.adapter_load, ("adapter_publish", "adapter_load")
    if transfer == "file":
        publish, load = moved / said.write_bandwidth, servers * moved / said.shared_bandwidth
        return publish, said.sync_seconds + load, ("sync_seconds", "write_bandwidth", "shared_bandwidth")
    if transfer == "delta":
        put = moved / said.delta_bandwidth
        load = servers * said.delta_share * moved / said.shared_bandwidth
        bandwidths = ("delta_bandwidth", "shared_bandwidth")
        return put, said.sync_seconds + put + load, ("sync_seconds", *bandwidths, "delta_share")
    names = ("sync_seconds", "tensor_seconds", "load_bandwidth")
    seconds = said.sync_seconds + tensors + moved / said.load_bandwidth
    if transfer == "ipc":
        return 0.0, seconds, names
    return 0.0, seconds + moved / (gpu.network * said.network_share), (*names, "network_share")


def _sources(gpu: Gpu, said: Assumptions, mfu: str, sync: tuple[str, ...], ranks: int) -> dict[str, str]:
    fields = type(said).model_fields

    def of(*names: str) -> str:
        return "; ".join(f"{name} = {getattr(said, name):.3g}, {fields[name].description}" for name in names)

    sheet = f"computed: sizes of the model, {gpu.source}"
    where = "NVLink" if ranks <= gpu.per_node else "the network between nodes"
    layer = "compiled_layer_seconds" if mfu in ("compiled_mfu", "kept_mfu") else "eager_layer_seconds"
    token = (mfu, "sharded_loss") if ranks > 1 else (mfu,)
    return {
        "servers.pass_seconds": f"{sheet}; {of('pass_seconds', 'memory_share')}",
        "servers.token_seconds": f"{sheet}; {of('prefill_mfu')}",
        "servers.context_token_seconds": f"{sheet}; {of('memory_share')}",
        "servers.slots": "assumed: vLLM's max_num_seqs, or as many as its cache has room for",
        "trainer.token_seconds": f"{sheet}; {of(*token)}",
        "trainer.micro_batch_seconds": of(layer),
        "trainer.gather_seconds": f"{sheet}, over {where}; {of('network_share', 'hop_seconds')}",
        "trainer.exposed_seconds": of("collective_seconds") if ranks > 1 else "computed: one rank gathers nothing",
        "trainer.update_seconds": f"{sheet}; {of('memory_share')}",
        "flow.request_seconds": of("request_seconds"),
        "flow.image_seconds": of("image_seconds"),
        "flow.rollout_seconds": of("rollout_seconds"),
        "publish_seconds": of(*sync),
        "sync_seconds": of(*sync),
    }
