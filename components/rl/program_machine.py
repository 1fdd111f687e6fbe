"""The machine of a `MultimodalGRPOTrainer`: which GPUs train, and which serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine, MachineServers, MachineTrainer, Scalar
from armature.components.inference.command import longest_sequence, takes_videos
from armature.components.inference.settings import ServerSettings
from armature.components.machine.resources import gpu_count

JOINED = ServerSettings(max_model_len=2**20, max_images_per_prompt=0, dtype="bfloat16")
"""Settings of a server that somebody else started, of which nothing is known: limits as wide as possible, and the least
precise dtype."""
LONGEST_SERVED = 8192
"""Limit of a server that the trainer starts, in tokens: the longest prompt with its completion."""
SHARED_GPU = 0.4
"""Part of a GPU's memory for a server that shares it with the trainer."""


def joining(machine: Machine, url: str) -> Machine:
    """Return the machine with the running server at `url` in place of its servers.

    Raises:
        ConfigurationError: `url` is not a URL of a server.
    """
    try:
        servers = MachineServers(endpoints=(url,))
    except ValidationError as error:
        raise ConfigurationError(
            f"{url!r} is not the URL of a server",
            code="server_not_url",
            where="server",
            remedy='pass "auto", or a URL such as http://10.0.0.7:8000',
        ) from error
    return machine.model_copy(update={"servers": servers})


def with_ranks(machine: Machine, processes: int) -> Machine:
    """Return the machine with the trainer's ranks on its first GPUs; without GPUs they are on the CPU.

    Raises:
        ConfigurationError: there are fewer GPUs.
    """
    if processes > (gpus := gpu_count()) > 0:
        raise ConfigurationError(
            f"processes = {processes}, but there {'is' if gpus == 1 else 'are'} {gpus} GPU{'s' * (gpus > 1)}",
            code="too_few_gpus",
            where="MultimodalRLConfig",
        )
    ranks = MachineTrainer(processes=processes, gpus=tuple(range(processes)) if gpus else ())
    return machine.model_copy(update={"trainer": ranks})


def default_processes() -> int:
    """Return the number of ranks of a training that starts its servers: half of the GPUs, and at least one."""
    return max(1, gpu_count() // 2)


def serving(
    machine: Machine, weights: Path, most_images: int, bf16: bool, most_videos: int = 0
) -> tuple[Machine, ServerSettings]:
    """Return the machine with servers that the training starts, and their settings.

    The first GPUs train, and each other GPU has a server. If all train, each GPU does both. Servers of a family with
    videos accept as many videos as images.

    Args:
        machine: the machine with the trainer's ranks.
        weights: folder of the model.
        most_images: largest number of images and videos in a prompt, if known, otherwise 0.
        bf16: whether the weights are served in bf16, as they are trained, and not in fp32.
        most_videos: number of videos that a prompt of the environment shows, if known. A family without videos is
            refused before its server starts.
    """
    gpus, ranks = gpu_count(), machine.trainer.processes
    free = range(ranks, gpus)
    shared: dict[str, Scalar] = {"gpu_memory_utilization": SHARED_GPU} if gpus and not free else {}
    servers = MachineServers(gpus=tuple((number,) for number in free or range(gpus)), arguments=shared)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if bf16 else "float32"
    served = ServerSettings(max_model_len=min(LONGEST_SERVED, longest_sequence(weights)), dtype=dtype)
    most = max(served.max_images_per_prompt, most_images)
    videos = max(most, most_videos) if takes_videos(weights) else most_videos
    shown = {"max_images_per_prompt": most, "max_videos_per_prompt": videos}
    return machine.model_copy(update={"servers": servers}), served.model_copy(update=shown)


def refuse_on_ranks(model: Any, adapter: Any) -> None:
    """Check that processes of their own can load the model and build its batches.

    Raises:
        ConfigurationError: the model or the adapter is an object of this process.
    """
    for what, value in (("model", None if isinstance(model, str | Path) else model), ("adapter", adapter)):
        if value is not None:
            raise ConfigurationError(
                f"several ranks load the model by its name, but {what} is {type(value).__name__}, an object",
                code="ranks_need_model_name",
                where="MultimodalGRPOTrainer",
                remedy="pass a folder or a name on the hub and no adapter, or set processes = 1",
            )
