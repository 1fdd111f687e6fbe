"""`armature train-multimodal @ FILE`: train from one TOML file with model, [env], [inference] and [trainer].

With an [inference] table, a model server is started first and stopped at the end of the training. Without it, the
trainer joins the server at `trainer.args.vllm_server_host` and `vllm_server_port`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from armature.components.configuration import read_toml
from armature.components.configuration.problems import explained
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import MachineServers, Scalar
from armature.components.inference.settings import ServerSettings
from armature.components.machine.resources import gpu_count
from armature.components.rl.config import MultimodalRLConfig

if TYPE_CHECKING:
    from armature.components.rl.trainer import MultimodalGRPOTrainer

USAGE = "Usage: armature train-multimodal @ path/to/file.toml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvTable(_Table):
    id: str
    args: dict[str, Any] = Field(default_factory=dict)


class InferenceArgs(BaseModel):
    """Arguments of the vLLM server. The trainer also reads the fields declared here; all other arguments go to vLLM
    unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)

    max_model_len: PositiveInt = 8192
    limit_mm_per_prompt: int | str | dict[str, int] = 4
    dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @property
    def images(self) -> int:
        """Maximum number of images per prompt. It may be written as 4, "image=4", '{"image": 4}' or {image = 4}."""
        limit = self.limit_mm_per_prompt
        if isinstance(limit, str):
            limit = json.loads(limit) if limit.lstrip().startswith("{") else int(limit.rpartition("=")[2])
        return limit if isinstance(limit, int) else limit["image"]


class InferenceTable(_Table):
    gpus: NonNegativeInt = 1
    args: InferenceArgs = InferenceArgs()


class TrainerTable(_Table):
    gpus: NonNegativeInt = 1
    args: dict[str, Any] = Field(default_factory=dict)


class MultimodalFile(_Table):
    """The contents of the TOML file. `revision` is the commit of a `model` on the hub."""

    model: str
    revision: str | None = None
    env: EnvTable
    inference: InferenceTable | None = None
    trainer: TrainerTable = TrainerTable()


def parse(arguments: Sequence[str]) -> MultimodalFile:
    """Read the file that the arguments `@ FILE` (or `@FILE`) name.

    Raises:
        ConfigurationError: the arguments have another form, the file does not exist, or it has an unknown key.
    """
    path = " ".join(arguments).removeprefix("@").strip()
    if not arguments or not arguments[0].startswith("@") or not path:
        raise ConfigurationError(USAGE, code="invalid_usage")
    with explained(MultimodalFile, path, "file", USAGE):
        return MultimodalFile.model_validate(read_toml(Path(path)))


def train(arguments: Sequence[str]) -> dict[str, float]:
    """Start the server if the file has an [inference] table, train, and return the metrics of the last step."""
    layout = parse(arguments)
    server_gpus = divide_gpus(layout)
    environment = {"env_id": layout.env.id, "env_args": layout.env.args}
    config = MultimodalRLConfig(**{"processes": max(1, layout.trainer.gpus)} | environment | layout.trainer.args)

    from armature.components.models.source import locate
    from armature.components.rl.trainer import MultimodalGRPOTrainer

    trainer = MultimodalGRPOTrainer(locate(layout.model, layout.revision), config=config)
    if layout.inference is not None:
        start_server(trainer, layout.inference, server_gpus)
    return trainer.train()


def divide_gpus(layout: MultimodalFile) -> tuple[int, ...]:
    """Return the numbers of the server's GPUs. The trainer has the GPUs before them.

    The result is empty if this machine has no GPU.

    Raises:
        ConfigurationError: the file asks for more GPUs than there are.
    """
    available = gpu_count()
    if available == 0:
        print("no GPU here: server and trainer run on the CPU", flush=True)
        return ()
    serving = layout.inference.gpus if layout.inference else 0
    if serving + layout.trainer.gpus > available:
        raise ConfigurationError(
            f"inference.gpus = {serving} and trainer.gpus = {layout.trainer.gpus}, but there are {available} GPUs",
            code="too_few_gpus",
        )
    return tuple(range(layout.trainer.gpus, layout.trainer.gpus + serving))


def start_server(trainer: MultimodalGRPOTrainer, table: InferenceTable, gpus: tuple[int, ...]) -> None:
    """Set the trainer up to start a server itself, at the port that its config names."""
    extra: Mapping[str, Any] = table.args.model_extra or {}
    arguments: dict[str, Scalar] = {"port": trainer.config.vllm_server_port, **extra}
    servers = MachineServers(gpus=(gpus,) if gpus else (), arguments=arguments)
    trainer.machine = trainer.machine.model_copy(update={"servers": servers})
    trainer.served = ServerSettings(
        max_model_len=table.args.max_model_len,
        max_images_per_prompt=table.args.images,
        dtype=table.args.dtype or ("bfloat16" if gpus else "float32"),
    )
