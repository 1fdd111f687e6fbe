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
    """Return a free port below 32768, where Linux begins to take ports for outgoing connections. So no connection takes
    the port while the server is stopped."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """An S3 server that can be stopped and started again at the same address. It logs requests and has one bucket. Its
    objects are lost when it stops."""

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
    """Inside the block, environment variables give S3 clients this server's address and credentials. The machine's own
    variables for S3 are removed."""
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
    """Run an S3 server with the bucket `bucket` while the block runs. S3 clients in the block use it."""
    server = Server(folder / "s3.log")
    with client_of(server.url):
        server.start()
        try:
            yield server
        finally:
            server.stop()
