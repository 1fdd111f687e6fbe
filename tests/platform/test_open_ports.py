"""A second machine finds no port of a training open: they are tried from another network namespace."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from tests.builders import make_machine
from tests.platform.conftest import assert_closed, reachable
from tests.vlm.conftest import model_settings, trainer_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def trainer_of(checkpoint: Path, folder: Path) -> TrainerClient:
    policy = TrainerPolicySettings(
        model_path=checkpoint,
        model=model_settings(),
        trainer=trainer_settings(),
        temperature=1.0,
        images=folder / "images",
    )
    machine = make_machine(trainer__processes=2, threads=1, loader_workers=0, ready_timeout=300)
    return TrainerClient(policy, machine, folder / "trainer")


def test_port_scan_finds_an_open_port(second_machine):
    """Else nothing found would mean nothing."""
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as loopback:
        ports = [one.getsockname()[1] for one in (everywhere, loopback)]
        assert reachable(second_machine, set(ports)) == {ports[0]}


def test_trainer_and_server_ports_are_closed_to_other_machines(second_machine, shared_server, tmp_path):
    with trainer_of(shared_server.checkpoint, tmp_path):
        family = psutil.Process().children(recursive=True)
        assert_closed(second_machine, family, {"armature.components.training.service", "vllm.entrypoints"})
