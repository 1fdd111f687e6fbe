"""A server that speaks the real protocol of S3: moto's, in a process of its own."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from s3fs import S3FileSystem


def lasting_port() -> int:
    """Return a free port that no outgoing connection takes while the server is away: those begin at 32768 on Linux."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """S3 at an address that stays, with a log of requests and a bucket. What it holds is lost when it ends."""

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, lasting_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.create_bucket(Bucket="bucket")
                return
            except (BotoCoreError, ClientError):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url)

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def sha256(self, name: str) -> str:
        return sha256(self.client.get_object(Bucket="bucket", Key=name)["Body"].read()).hexdigest()

    def requests(self, method: str) -> int:
        return self.log.read_text().count(f'"{method} /')


@contextmanager
def client_of(url: str) -> Iterator[None]:
    """Within, clients of S3 find this server and credentials, and nothing that the machine has of its own."""
    S3FileSystem.clear_instance_cache()  # its key has no variables of the environment: it would be of an earlier server
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "x")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_ENDPOINT_URL", url)
        yield


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server with the bucket `bucket`, which clients within find."""
    server = Server(folder / "s3.log")
    with client_of(server.url):
        server.start()
        try:
            yield server
        finally:
            server.stop()
