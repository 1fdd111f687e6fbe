"""Facts of the machine a run is on. None of them changes results, so none of them is hashed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Scalar = bool | int | float | str


class Machine(BaseModel):
    """Where artifacts lie, which servers generate, which devices train, and how long to wait for each."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Machine")

    store: str = Field(".armature/store", description="Folder of the artifact store.")
    remote_store: str | None = Field(
        None,
        description="fsspec URL (s3://bucket/prefix) that finished artifacts are copied to and found in.",
    )
    servers: PositiveInt = Field(1, description="Local vLLM servers to start when no endpoints are given.")
    endpoints: tuple[str, ...] = Field((), description="Base URLs of running vLLM servers to join instead.")
    weight_transfer: Literal["file", "nccl", "ipc"] = Field(
        "file", description="How new weights reach the servers; nccl and ipc need GPUs."
    )
    server_python: Path = Field(Path(".venv-vllm/bin/python"), description="Interpreter that has vLLM.")
    server_gpus: tuple[tuple[int, ...], ...] = Field(
        (), description="CUDA devices of each local server, e.g. [[0, 1], [2, 3]]; empty on CPU."
    )
    server_arguments: dict[str, Scalar] = Field(
        default_factory=dict, description="More vLLM arguments, e.g. {gpu_memory_utilization = 0.8}."
    )
    server_environment: dict[str, str] = Field(
        default_factory=dict,
        description="More environment variables for vLLM, e.g. {NCCL_P2P_DISABLE = '1'}.",
    )
    trainer_processes: PositiveInt = Field(1, description="Ranks of the trainer on each node.")
    trainer_gpus: tuple[int, ...] = Field((), description="CUDA devices of the trainer on each node; empty on CPU.")
    trainer_nodes: PositiveInt = Field(
        1,
        description="Nodes that train, this one first; the others run `armature join`. Only for train-vla.",
    )
    trainer_rendezvous: str | None = Field(
        None,
        pattern=r"^[^\s:]+:\d{1,5}$",
        description="HOST:PORT of the first node where several meet; the port is free and the others reach it.",
    )
    trainer_environment: dict[str, str] = Field(default_factory=dict)
    threads: int = Field(0, ge=0, description="CPU threads of each trainer rank and server; 0 lets torch choose.")
    loader_workers: int = Field(1, ge=0, description="Processes that decode images and build micro-batches.")
    environment_processes: int = Field(
        0, ge=0, description="Processes that play episodes of environments that need some; 0: half of the cores."
    )
    task_runner: Literal["threads", "dask"] = Field(
        "threads", description="What computes statistics of datasets: threads of this process, or a Dask cluster."
    )
    dask_scheduler: str | None = Field(
        None,
        description="Address of a Dask scheduler (tcp://host:8786) that sees the dataset; none starts a local one.",
    )
    max_concurrent: PositiveInt = Field(128, description="Requests under way at once over the whole pool.")
    ready_timeout: PositiveFloat = Field(600.0, description="Seconds for a server or the trainer to come up.")
    generation_timeout: PositiveFloat = Field(600.0, description="Seconds for one generation request.")
    environment_timeout: PositiveFloat = Field(
        120.0, description="Seconds for one reset, step or close of an environment."
    )
    sync_timeout: PositiveFloat = Field(300.0, description="Seconds for new weights to reach every server.")
    train_timeout: PositiveFloat = Field(3600.0, description="Seconds for one training step.")

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Self:
        if self.trainer_nodes > 1 and self.trainer_rendezvous is None:
            raise ValueError(
                f"trainer_nodes = {self.trainer_nodes} needs trainer_rendezvous, the HOST:PORT of the first node"
            )
        return self

    @property
    def playing_processes(self) -> int:
        """`environment_processes`, or half of the cores."""
        return self.environment_processes or max(1, (os.cpu_count() or 1) // 2)
