"""Nodes, and the platform of infra/compose on one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from armature.components.machine.process import Program
from tests.production.nodes import Network, Node
from tests.production.services import Compose, start_postgres, start_s3

SECRETS = {
    "POSTGRES_PASSWORD": "a1b2c3d4e5f6",
    "PREFECT_API_AUTH_STRING": "armature:prefect-password",
    "MLFLOW_PASSWORD": "mlflow-password",
    "MLFLOW_COOKIE_KEY": "cookie-key",
    "BUCKETS_USER": "armature",
    "BUCKETS_PASSWORD": "store-password",
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network")) as network:
        yield network


@dataclass(frozen=True)
class Platform:
    """The platform of infra/compose, whose servers run on `node`. `environment` has the variables with which a worker
    reaches them."""

    node: Node
    compose: Compose

    @property
    def environment(self) -> Mapping[str, str]:
        return self.compose.environment("worker")

    def add_servers(self, node: Node) -> None:
        """Link the Python environment of model servers into a node, at its place in the image."""
        (node.folder / ".venv-vllm").symlink_to(Path(__file__).parents[2] / ".venv-vllm")

    def start_worker(self, node: Node) -> Program:
        self.add_servers(node)
        return self.compose.start(node, "worker")


@pytest.fixture(scope="module")
def platform(network: Network) -> Platform:
    """The running platform, which uses PostgreSQL and S3, with its work pools and deployments."""
    began = time.monotonic()
    node = network.add("platform", "postgres", "minio", "prefect-server", "mlflow")
    compose = Compose(SECRETS)
    (databases,) = compose.files("postgres").values()
    start_postgres(node, SECRETS["POSTGRES_PASSWORD"], databases)
    start_s3(node, compose.environment("worker"), "mlflow", "artifacts")
    servers = {name: compose.start(node, name) for name in ("prefect-server", "mlflow")}
    for name, server in servers.items():
        compose.wait_until_healthy(node, name, server)
    provision = compose.start(node, "provision")
    assert provision.wait(600) == 0, provision.tail(60)
    print(f"the platform was up after {time.monotonic() - began:.0f} s")
    return Platform(node, compose)
