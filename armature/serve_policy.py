"""`armature serve-policy`: serve a robot policy to robots and simulators until it is interrupted."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError, keep_secret
from armature.components.machine.network import metrics_server
from armature.components.machine.private_files import write_private
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.server.metrics import EventFormatter, PolicyServerMetrics, log
from armature.components.robots.server.server import PolicyServer, refuse_open_address
from armature.components.robots.server.settings import PolicyServerSettings
from armature.components.robots.server.wire import KEY, ObservationFormat
from armature.export import find_checkpoint
from armature.services import STATE

KEY_FILE = STATE / "serve-policy.key"
"""File with the key, if the variable is not set."""


def serve_policy(
    checkpoint: str,
    store: Path,
    settings: PolicyServerSettings,
    with_key: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a policy until it is interrupted.

    Args:
        checkpoint: folder, digest of an artifact in `store`, or models:/NAME@ALIAS.
        with_key: require a key; without one, any program on this machine can send observations.
        say: receives the text that says how to connect, once the server answers.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the checkpoint does not exist or is incomplete.
        ServerError: the policy cannot answer.
    """
    refuse_open_address(settings, with_key)
    folder = find_checkpoint(checkpoint, store)
    key = _key() if with_key else None
    policy = open_flow_policy(
        folder,
        mode=settings.inference_action_mode,
        rows=settings.batch,
        n_action_steps=settings.n_action_steps,
        num_inference_steps=settings.num_inference_steps,
        torch_compile=settings.torch_compile,
        quantization=settings.quantization,
        refuse_undecoded=True,  # otherwise the middle of the action range would be sent to a real robot
    )
    most = policy.most_previous_actions
    previous = (most, policy.action_dimensions, policy.n_action_steps) if most else None
    form = ObservationFormat.of(policy.cameras, policy.state_dimensions, settings.state, settings.cameras, previous)
    metrics = PolicyServerMetrics()
    server = PolicyServer(policy, form, settings, key, {"checkpoint": checkpoint, **policy.facts()}, metrics)
    _log_lines()
    with ExitStack() as stack:
        if settings.metrics is not None:
            url = stack.enter_context(metrics_server(settings.metrics, metrics.registry, "--metrics"))
            say(f"metrics at {url}")
        with suppress(asyncio.CancelledError):
            asyncio.run(_serve(server, lambda url: say("\n".join(how_to_connect(url, form, key)))))


async def _serve(server: PolicyServer, ready: Callable[[str], None]) -> None:
    """Run the server until SIGINT or SIGTERM; `ready` is called with its URL once it answers."""
    task = asyncio.current_task()
    assert task is not None
    for interruption in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(interruption, task.cancel)
    await server.run(ready)


def how_to_connect(url: str, form: ObservationFormat, key: str | None) -> list[str]:
    """Return lines that tell a robot's operator how to connect. The key itself is not shown."""
    lines = [f"serving at {url}; observations have the fields {', '.join(form.fields)}"]
    if key is not None:
        place = KEY_FILE if KEY not in os.environ else f"the variable {KEY}"
        lines.append(f"  the key is in {place}: clients send the header Authorization: Api-Key KEY")
    return [*lines, "Ctrl-C ends it"]


def _key() -> str:
    """Return the key that clients have to send.

    It is the value of the environment variable `KEY`. If that is not set, it is read from `KEY_FILE`, which is created
    with a new key if it does not exist.

    Raises:
        ConfigurationError: the key is too short, or has characters that a header cannot hold.
    """
    key = os.environ.get(KEY)
    from_file = key is None
    if key is None:
        write_private(KEY_FILE, secrets.token_urlsafe(32), replace=False)
        KEY_FILE.chmod(0o600)
        key = KEY_FILE.read_text(errors="replace").strip()
    if not re.fullmatch(r"[!-~]{16,}", key):
        raise ConfigurationError(
            "the key is not 16 or more letters, digits and signs without spaces",
            code="invalid_policy_key",
            where=str(KEY_FILE) if from_file else KEY,
            remedy="delete the file, and a new key is made" if from_file else "correct or unset the variable",
        )
    keep_secret(key)
    return key


def _log_lines() -> None:
    """Write the server's events to standard error, one JSON object per line."""
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
