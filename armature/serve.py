"""`armature serve`: one vLLM server that runs and trainers join, until it is interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ServerError, keep_secret
from armature.components.contracts.machine import Machine
from armature.components.families.family import family_of
from armature.components.inference.command import ServedAdapters, longest_sequence, read_config
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from armature.components.machine.private_files import private_folder
from armature.components.models.source import locate
from armature.services import STATE

LOGS = STATE / "serve"
POLL = 1.0


def serve_model(
    model: str,
    revision: str | None,
    settings: ServerSettings,
    machine: Machine,
    say: Callable[[str], None] = print,
    shorter: bool = False,
    max_lora_rank: int = 0,
) -> None:
    """Serve a checkpoint folder, an artifact or a hub name until it is interrupted.

    The key is VLLM_API_KEY, or is made; without it the server answers nothing but liveness.

    Args:
        say: is told how to join, when the server answers.
        shorter: `settings.max_model_len` is lowered to what the model has positions for.
        max_lora_rank: of the adapters of trainings that send these alone; 0: none.

    Raises:
        ConfigurationError: a hub name without a revision, a family that is unknown, or an option that cannot be.
        DataError: there is no such checkpoint.
        ServerError: it does not start, or ends.
    """
    folder = locate(model, revision)
    if shorter:
        longest = min(settings.max_model_len, longest_sequence(folder))
        settings = settings.model_copy(update={"max_model_len": longest})
    adapters = None
    if max_lora_rank:
        family = family_of(str(read_config(folder).get("model_type")))
        adapters = ServedAdapters(max_lora_rank, "vision" in family.served_adapters)
    key = os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(32)
    keep_secret(key)
    server = VllmServer(settings, machine, index=0, log_folder=private_folder(LOGS), api_key=key, adapters=adapters)
    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(server, folder, say))


@contextmanager
def vllm_server(model: str | Path, log_folder: Path = LOGS, **settings: Any) -> Iterator[VllmServer]:
    """Run a vLLM server on `model` for the length of a `with` block, for scripts and notebooks.

    The server's key is VLLM_API_KEY. If that variable is not set, a new key is stored in it, so that trainers and
    clients in this process can join the server.

    Args:
        model: a checkpoint folder, or an artifact of a checkpoint.
        log_folder: receives the server's log files.
        settings: fields of `ServerSettings`, the `[inference]` section of a recipe.

    Raises:
        ConfigurationError: a setting is unknown, or the model's family is.
        DataError: `model` is not a checkpoint.
        ServerError: the server does not start; the error shows the last lines of its log.

    Example:
        with vllm_server("outputs/model", max_model_len=2048) as server:
            config = MultimodalRLConfig(vllm_server_port=server.port, ...)
    """
    key = os.environ.setdefault("VLLM_API_KEY", secrets.token_urlsafe(32))
    keep_secret(key)
    server = VllmServer(
        ServerSettings(**settings), Machine(), index=0, log_folder=private_folder(log_folder), api_key=key
    )
    asyncio.run(server.start(locate(str(model))))
    try:
        yield server
    finally:
        server.end()


async def _serve(server: VllmServer, folder: Path, say: Callable[[str], None]) -> None:
    own = asyncio.current_task()
    assert own is not None
    for interruption in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(interruption, own.cancel)
    await server.start(folder)
    try:
        say("\n".join(how_to_join(server.url, None if "VLLM_API_KEY" in os.environ else server.api_key)))
        while server.alive:
            await asyncio.sleep(POLL)
        raise ServerError(
            f"the server ended; its last lines:\n{server.tail()}", code="server_ended", where=str(server.log)
        )
    finally:
        await server.stop()


def how_to_join(url: str, key: str | None) -> list[str]:
    """What a run, the trainer class and any client of the OpenAI protocol are told, for a shell.

    `key`: one that was made here. A key of the environment is known there, and not shown.
    """
    shown = "the key of this server" if key is None else key
    endpoints = shlex.quote(f"endpoints={json.dumps([url])}")
    return [
        f"serving at {url} as the model 'policy'; in the shell of whoever joins:",
        f"  export VLLM_API_KEY={shlex.quote(shown)}",
        f"  armature run RECIPE --machine {endpoints}",
        f"  or MultimodalRLConfig(vllm_server_port={url.rpartition(':')[2]}, ...)",
        "Ctrl-C ends it",
    ]
