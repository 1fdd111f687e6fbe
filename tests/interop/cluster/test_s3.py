"""The remote store behind the real protocol of S3, spoken by moto's server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
import pyarrow as pa
import pytest
from PIL import Image
from s3fs import S3FileSystem

from armature.components.artifacts import remote_folder
from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.artifacts.tables import IMAGE_REF, TableSchema, write_table
from armature.components.contracts.errors import StoreError
from tests.interop.cluster.s3_server import Server, running
from tests.refusals import refused

IMAGE_REF_COLUMN = pa.schema([("images", pa.list_(IMAGE_REF))])
URL = "s3://bucket/prefix"
FILES = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("s3")) as server:
        yield server


def table(images: ImageStore, count: int) -> Callable[[Path], None]:
    """Return a function that fills an artifact's folder with a table that refers to `count` images, and with `FILES`
    small files."""
    schema = TableSchema("shown", 1, IMAGE_REF_COLUMN)

    def fill(folder: Path) -> None:
        refs = [images.put(encode_png(Image.new("RGB", (8, 8), (number, 0, 0)))) for number in range(count)]
        rows = [{name: getattr(ref, name) for name in ("sha256", "media_type", "width", "height")} for ref in refs]
        write_table(folder / "shown.parquet", [{"images": rows}], schema)
        for number in range(FILES):
            (folder / f"{number}").write_bytes(os.urandom(100))
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return fill


def test_artifact_with_images_needs_one_request_per_file(tmp_path, server):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    made = one.write("stage", "f1", table(ImageStore(one.images), 50))
    one.send_waiting()
    time.sleep(0.2)
    # its files, the table and the manifest; the archive, the digest, the marker, the trial of the condition; the bucket
    assert server.requests("PUT") == FILES + 2 + 4 + 1
    result = two.find_digest(made.digest)
    assert result is not None and result.digest == made.digest
    assert {path.name for path in one.images.glob("??/*")} == {path.name for path in two.images.glob("??/*")}


def test_sent_checkpoint_is_removed_after_the_stage(tmp_path, server):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    one.begin("stage", "f2", afresh=False)
    for step in (2, 4):
        checkpoint = one.workspace("stage", "f2") / f"trainer/checkpoints/step-{step:06d}"
        (checkpoint / "tensors").mkdir(parents=True)
        (checkpoint / "tensors/0").write_bytes(bytes([step]) * 2**24)  # in parts
        one.send_checkpoint("stage", "f2", checkpoint)
        one._senders["stage-f2"].join()
    two.begin("stage", "f2", afresh=False)
    result = two.workspace("stage", "f2") / "trainer/checkpoints"
    assert [path.name for path in result.iterdir()] == ["step-000004"]
    assert (result / "step-000004/tensors/0").read_bytes() == bytes([4]) * 2**24
    sent = [name.removeprefix("prefix/attempts/stage-f2/") for name in server.names() if "/attempts/stage-f2/" in name]
    assert len(sent) == 4 and {"000001.json", "000001/newest.json", "000002.json"} < set(sent)
    one.finish("stage", "f2")
    assert not [name for name in server.names() if "/attempts/stage-f2/000001/" in name]


def test_damaged_artifact_is_removed_from_the_remote(tmp_path, server):
    store = ArtifactStore(tmp_path, URL)
    for fingerprint in ("f3", "f3-00001", "f30"):
        store.write("stage", fingerprint, table(ImageStore(store.images), 1))
    store.send_waiting()
    with store.lock("stage", "f3"):
        store.set_aside("stage", "f3")
    left = {name.split("/")[2] for name in server.names() if name.startswith("prefix/stage/f3")}
    assert left == {"f30"}


MAKES = """
import os, sys
from pathlib import Path
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore

def fill(folder):
    (folder / "weights").write_bytes(os.urandom(1000))
    write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})
    print("made", flush=True)
    sys.stdin.readline()

print(ArtifactStore(Path(sys.argv[1]), sys.argv[2]).write("stage", "f5", fill).digest)
"""


def test_machines_that_finish_together_have_one_result(tmp_path, server):
    """Each made other bytes, and all begin to send them at once."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", MAKES]
    machines = [subprocess.Popen([*command, tmp_path / f"{number}", URL], **pipes) for number in range(4)]
    assert [machine.stdout.readline() for machine in machines] == ["made\n"] * 4
    for machine in machines:
        machine.stdin.write("\n")
        machine.stdin.flush()
    digests = [machine.communicate(timeout=120)[0].splitlines()[-1] for machine in machines]
    result = ArtifactStore(tmp_path / "another", URL).find("stage", "f5")
    assert result is not None and digests == [result.digest] * 4
    copies = {name.split("/")[3] for name in server.names() if name.startswith("prefix/stage/f5/")}
    assert len(copies) == 2  # one of them, and the marker


def test_missing_bucket_is_an_error(tmp_path, server):
    with pytest.raises(StoreError, match="there is no bucket 'buckte'"):
        ArtifactStore(tmp_path, "s3://buckte/prefix").find("stage", "f1")
    assert [each["Name"] for each in server.client.list_buckets()["Buckets"]] == ["bucket"]


def test_missing_credentials_are_an_immediate_error(tmp_path, server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    S3FileSystem.clear_instance_cache()
    with refused("remote_store_access_denied"):
        ArtifactStore(tmp_path, URL).find("stage", "f1")
    S3FileSystem.clear_instance_cache()


ACCOUNTS = {
    "reader": (("s3:GetObject", "s3:ListBucket"), ("AccessDenied", "PutObject")),
    "blind": (("s3:GetObject", "s3:PutObject"), ("AccessDenied", "ListObjectsV2")),
    "stranger": (("s3:*",), ("SignatureDoesNotMatch", "ListObjectsV2")),
}
"""Accounts by name: their rights, and parts of the error that they get. The stranger sends a wrong secret key."""


def test_denied_request_is_named(tmp_path, monkeypatch):
    with running(tmp_path) as server:
        users, keys = boto3.client("iam", endpoint_url=server.url), {}
        for name, (rights, _) in ACCOUNTS.items():
            users.create_user(UserName=name)
            statement = [{"Effect": "Allow", "Action": rights, "Resource": "*"}]
            policy = json.dumps({"Version": "2012-10-17", "Statement": statement})
            users.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
            keys[name] = users.create_access_key(UserName=name)["AccessKey"]
        keys["stranger"]["SecretAccessKey"] = "another"
        # From here on, the server looks at rights.
        headers = {"Content-Type": "text/plain"}
        urlopen(Request(f"{server.url}/moto-api/reset-auth", data=b"0", headers=headers, method="POST"))
        for name, (_, shown) in ACCOUNTS.items():
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[name]["AccessKeyId"])
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[name]["SecretAccessKey"])
            S3FileSystem.clear_instance_cache()
            with refused("remote_store_access_denied", *shown):
                ArtifactStore(tmp_path / name, URL).begin("stage", "f1", afresh=False)
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("url", "endpoint", "code", "shown"),
    [
        ("s3://bucket/prefix", "http://127.0.0.1:9", "remote_store_unreachable", ("http://127.0.0.1:9",)),
        ("s3://bucket/prefix", "127.0.0.1:9", "remote_store_not_usable", ("127.0.0.1:9", "AWS_ENDPOINT_URL")),
        ("s3://Bucket!/prefix", None, "remote_store_not_usable", ("Bucket!",)),
    ],
)
def test_invalid_store_address_is_an_error(tmp_path, server, monkeypatch, url, endpoint, code, shown):
    monkeypatch.setattr(remote_folder, "RETRY_WAITS_S", ())
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    S3FileSystem.clear_instance_cache()
    with refused(code, *shown):
        ArtifactStore(tmp_path, url).find("stage", "f1")
    S3FileSystem.clear_instance_cache()


def test_s3_outage_delays_uploads(tmp_path, server, monkeypatch):
    output: list[str] = []
    monkeypatch.setattr(remote_folder, "RETRY_WAITS_S", (0.1,))
    server.stop()
    store = ArtifactStore(tmp_path / "one", URL, say=output.append)
    made = store.write("stage", "f4", table(ImageStore(store.images), 3))
    assert output[-1].startswith("warning: not sent")
    with pytest.raises(StoreError, match="does not answer"):
        store.send_waiting()
    server.start()
    later = ArtifactStore(tmp_path / "one", URL)
    later.send_waiting()
    result = ArtifactStore(tmp_path / "two", URL).find("stage", "f4")
    assert result is not None and result.digest == made.digest
