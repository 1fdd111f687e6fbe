"""PostgreSQL, S3 and the services of infra/compose, with the very commands and variables, as programs of nodes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from armature.components.machine.process import Program
from tests.production.nodes import DISK, Node, wait_for

COMPOSE = Path(__file__).parents[2] / "infra/compose"
IN_IMAGES = {"/home/armature": DISK / "home", "/opt/armature": DISK, "/tmp/": f"{DISK}/tmp/"}
"""Paths in the container images, and the paths on a node that replace them."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def start_postgres(node: Node, password: str, databases: Path) -> Program:
    """Start PostgreSQL on a node, as the system user `postgres`. Its superuser is `armature` with this password.

    `databases` is an SQL file that makes the databases.
    """
    folder = DISK / "postgres"
    binaries = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    result = shutil.which("initdb") or (binaries[-1] / "initdb" if binaries else None)
    assert result is not None, "PostgreSQL is missing: apt-get install postgresql"
    binary = Path(result).resolve().parent
    (node.folder / "postgres").mkdir()
    (node.folder / "password").write_text(password)
    shutil.chown(node.folder / "postgres", "postgres", "postgres")
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    login = ["--username=armature", "--pwfile=/srv/password", "--auth=scram-sha-256", "--no-sync"]
    node.run([*as_postgres, binary / "initdb", f"--pgdata={folder}", *login])
    with (node.folder / "postgres/pg_hba.conf").open("a") as rules:
        rules.write("host all all samenet scram-sha-256\n")
    settings = ["-c", "listen_addresses=*", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
    server = node.start([*as_postgres, binary / "postgres", "-D", folder, *settings], log="postgres.log")
    wait_for(lambda: "ready to accept connections" in (node.folder / "postgres.log").read_text(), server)
    psql = [binary / "psql", "--host=postgres", "--username=armature", "--dbname=postgres", "--set=ON_ERROR_STOP=1"]
    node.run([*psql, f"--file={databases}"], {"PGPASSWORD": password})
    return server


def start_s3(node: Node, client: Mapping[str, str], *buckets: str) -> Program:
    """Start moto's S3 server on a node, in place of MinIO, and create the buckets. It has objects in memory and accepts
    any credentials.

    Args:
        client: environment variables with the server's address and credentials.
    """
    port = client["AWS_ENDPOINT_URL"].rpartition(":")[2]
    server = node.start(["moto_server", "--host=0.0.0.0", f"--port={port}"], log="s3.log")
    wait_for(lambda: "Running on" in (node.folder / "s3.log").read_text(), server)
    make = f"import boto3; s3 = boto3.client('s3', 'us-east-1'); [s3.create_bucket(Bucket=name) for name in {buckets}]"
    node.run(["python", "-c", make], client)
    return server


class Compose:
    """The services in compose.yaml. `start` runs a service as a program of a node instead of a container.

    Args:
        variables: values of the variables that the file `.env` would set.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._services: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
        self._variables = variables

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a service. Variables that its image sets are not included."""
        service = self._services[name]
        arguments = dict[str, str]()
        if file := service.get("env_file"):
            lines = (COMPOSE / file).read_text().splitlines()
            arguments |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        arguments |= service["environment"]
        return {**ONE_THREAD, **OFFLINE, **{key: self._filled(value) for key, value in arguments.items()}}

    def files(self, name: str) -> dict[str, Path]:
        """Return the files of this repository that are mounted into a service, by their paths in the container."""
        parts = [volume.split(":") for volume in self._services[name].get("volumes", ())]
        return {part[1]: COMPOSE / part[0] for part in parts if part[0].startswith(".")}

    def start(self, node: Node, name: str) -> Program:
        environment = self.environment(name)
        for number, (target, file) in enumerate(self.files(name).items()):
            (node.folder / f"{name}-{number}").write_text(_on_node(file.read_text()))
            environment = {key: value.replace(target, f"{DISK}/{name}-{number}") for key, value in environment.items()}
        command = [self._filled(word) for word in self._services[name]["command"]]
        return node.start(command, environment, f"{name}.log")

    def wait_until_healthy(self, node: Node, name: str, service: Program) -> None:
        _, *check = self._services[name]["healthcheck"]["test"]

        def healthy() -> bool:
            try:
                node.run(check)
            except AssertionError:
                return False
            return True

        wait_for(healthy, service)

    def _filled(self, text: str) -> str:
        """Return a text in which `${NAME}`, `${NAME:-default}` and `${NAME:?message}` are replaced by the variables'
        values, and folders of the image by folders of a node."""

        def value(result: re.Match[str]) -> str:
            name, kind, default = result.groups()
            return self._variables.get(name, default) if kind == ":-" else self._variables[name]

        return _on_node(re.sub(r"\$\{(\w+)(?:(:[-?])(.*?))?\}", value, text))


def _on_node(text: str) -> str:
    for folder, place in IN_IMAGES.items():
        text = text.replace(folder, str(place))
    return text
