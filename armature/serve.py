"""`armature serve`: run one vLLM server, which runs and trainers join, until it is interrupted."""

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
"""Seconds between two checks that the server is alive."""


def serve_model(
    model: str,
    revision: str | None,
    settings: ServerSettings,
    machine: Machine,
    say: Callable[[str], None] = print,
    shorter: bool = False,
    max_lora_rank: int = 0,
) -> None:
    """Serve a model until the program is interrupted.

    The server's key is VLLM_API_KEY, or a new key if that is not set. Requests without the key are refused, except
    those that ask whether the server is alive.

    Args:
        model: a checkpoint folder, an artifact or a hub name.
        revision: commit, tag or branch of a hub name.
        say: receives the text that says how to join, once the server answers.
        shorter: lower `settings.max_model_len` to the model's number of positions.
        max_lora_rank: largest rank of LoRA adapters that trainings may send; 0: no adapters.

    Raises:
        ConfigurationError: a hub name has no revision, the model's family is unknown, or an option is invalid.
        DataError: the checkpoint does not exist.
        ServerError: the server does not start, or ends.
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
    """Start the server with the model in `folder`, and keep it running until SIGINT or SIGTERM.

    `say` receives the text that says how to join, once the server answers.
    """
    task = asyncio.current_task()
    assert task is not None
    for interruption in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(interruption, task.cancel)
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
    """Return lines for a shell that say how a run, `MultimodalGRPOTrainer` or an OpenAI client joins the server.

    Args:
        key: a key that was made here and is shown; None: the key comes from the environment and is not shown.
    """
    shown = "the key of this server" if key is None else key
    endpoints = shlex.quote(f"servers.endpoints={json.dumps([url])}")
    return [
        f"serving at {url} as the model 'policy'; in the shell of the program that joins:",
        f"  export VLLM_API_KEY={shlex.quote(shown)}",
        f"  armature run RECIPE --machine {endpoints}",
        f"  or MultimodalRLConfig(vllm_server_port={url.rpartition(':')[2]}, ...)",
        "Ctrl-C ends it",
    ]
