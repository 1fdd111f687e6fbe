"""A stand-in for the Hugging Face hub at the outermost edge: an HTTP server that speaks to huggingface_hub.

Repositories with commits and branches; downloads; uploads by preupload, LFS batch and commit. Large files go through
LFS, as the hub's Xet storage is off. It refuses writers without its token, and fails on demand.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    """A repository of the hub. `commits` maps a commit to its files by path. `branches` maps a branch or tag to its
    commit."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: Mapping[str, bytes]) -> str:
        """Add a commit to `branch` that has exactly these files, and return its id."""
        content = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
        commit = hashlib.sha1(f"{self.branches.get(branch)} {content}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class HubServer:
    """A stand-in for the Hugging Face hub: its repositories, the requests it received, and the requests that will fail.

    `faults` are pairs of a regular expression and an HTTP status. The first request whose "METHOD path" matches the
    expression gets the status, and the pair is removed. With status 0, the connection is cut.
    """

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    faults: list[tuple[str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with `files` to a public repository, which is created if it is missing. Return its id."""
        return self.repositories.setdefault((kind, name), Repository(private=False)).commit(branch, files)

    def fault(self, request: str) -> int | None:
        for number, (pattern, status) in enumerate(self.faults):
            if re.search(pattern, request):
                del self.faults[number]
                return status
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer_to()

    do_GET = do_POST = do_PUT = do_HEAD

    def _answer_to(self) -> None:
        parts = urlsplit(self.path)
        path, request = unquote(parts.path), f"{self.command} {unquote(parts.path)}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.asked.append(request)
            if token := self.headers.get("Authorization"):
                self.hub.tokens.add(token.removeprefix("Bearer "))
            fault = self.hub.fault(request)
            if fault == 0:
                self.close_connection = True
                self.connection.close()
                return
            if fault is not None:
                self._send(fault, {"error": "a fault of the test"})
                return
            try:
                self._route(path, body, parse_qs(parts.query))
            except _Refused as refused:
                self._send(refused.status, {"error": refused.text}, {"X-Error-Code": refused.code})

    def _route(self, path: str, body: bytes, query: Mapping[str, list[str]]) -> None:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            errors = [] if isinstance(head, dict) else [{"message": "not a mapping"}]
            return self._send(400 if errors else 200, {"errors": errors, "warnings": []})
        if path == "/api/whoami-v2":
            self._refuse_strangers()
            return self._send(200, {"type": "user", "name": "someone", "orgs": []})
        if path.startswith("/objects/"):
            return self._object(path.removeprefix("/objects/"), body)
        if result := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._refuse_strangers()
            return self._batch(json.loads(body))
        if result := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+)(?:/(.+))?)?", path):
            kind, name, verb, rest = result.groups()
            return self._api(kind, name, verb or "revision", rest or "main", body)
        if result := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file("dataset" if result[1] else "model", *result.groups()[1:])
        raise _Refused(404, "EntryNotFound", path)

    def _api(self, kind: str, name: str, verb: str, rest: str, body: bytes) -> None:
        repository = self._repository(kind, name)
        if verb == "branch":
            self._refuse_strangers()
            if rest in repository.branches:
                raise _Refused(409, "", "the branch exists")
            repository.branches[rest] = repository.branches["main"]
            return self._send(201, {})
        revision, _, folder = rest.partition("/")
        commit = repository.find(rest) or repository.find(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"no revision {rest}")
        files = repository.commits[commit]
        if verb == "revision":
            siblings = [{"rfilename": each} for each in sorted(files)]
            facts = {"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
            library = re.search(rb"^library_name: (.*)$", files.get("README.md", b""), re.MULTILINE)
            return self._send(200, facts | ({"library_name": library[1].decode()} if library else {}))
        if verb == "tree":
            return self._send(200, [_entry(each, files[each]) for each in sorted(files) if each.startswith(folder)])
        if verb == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return self._send(200, [_entry(each, files[each]) for each in asked if each in files])
        self._refuse_strangers()
        if verb == "preupload":
            listed = json.loads(body)["files"]
            return self._send(200, {"files": [_mode(each, files) for each in listed]})
        assert verb == "commit", verb
        changed = dict(files)
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                changed[value["path"]] = self.hub.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del changed[value["path"]]
        if revision not in repository.branches:
            raise _Refused(404, "RevisionNotFound", f"no branch {revision}")
        made = repository.commit(revision, changed)
        return self._send(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{made}", "commitOid": made})

    def _create(self, asked: dict[str, Any]) -> None:
        self._refuse_strangers()
        name, kind = f"{asked['organization']}/{asked['name']}", asked.get("type", "model")
        if (kind, name) in self.hub.repositories:
            url = f"{self.hub.url}/{name}"
            return self._send(409, {"error": "You already created this repo", "url": url, "id": name})
        if asked["organization"] == "somebody-else":
            raise _Refused(403, "", "You don't have the rights to create a model under this namespace")
        repository = self.hub.repositories[kind, name] = Repository(private=asked.get("visibility") == "private")
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return self._send(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            upload = {"href": f"{self.hub.url}/objects/{each['oid']}"}
            verify = {"href": f"{self.hub.url}/objects/verify"}
            new = each["oid"] not in self.hub.objects
            objects.append({**each, **({"actions": {"upload": upload, "verify": verify}} if new else {})})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _object(self, oid: str, body: bytes) -> None:
        if self.command == "POST":
            return self._send(200, {})
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "", "another content than was announced")
        self.hub.objects[oid] = body
        return self._send(200, {})

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind, name)
        commit = repository.find(revision)
        if commit is None or path not in repository.commits[commit]:
            raise _Refused(404, "EntryNotFound" if commit else "RevisionNotFound", path)
        data = repository.commits[commit][path]
        self._send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    def _repository(self, kind: str, name: str) -> Repository:
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not self._is_known()):
            raise _Refused(404, "RepoNotFound", "Repository not found")
        return repository

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _refuse_strangers(self) -> None:
        if not self._is_known():
            raise _Refused(401, "", "Invalid username or password.")

    def _send(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            status, data = 206, data[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, text: str) -> None:
        self.status, self.code, self.text = status, code, text


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _mode(file: Mapping[str, Any], known: Mapping[str, bytes]) -> dict[str, object]:
    lfs = file["path"].endswith(".safetensors")
    old = known.get(file["path"])
    oid = None if old is None else hashlib.sha256(old).hexdigest() if lfs else _blob(old)
    return {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}


def _blob(data: bytes) -> str:
    """Return the id that git gives to a file with this content: its SHA-1 as a blob."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serve_hub(cache: Path) -> Iterator[HubServer]:
    """Run a stand-in for the hub while the block runs, and make huggingface_hub in this process use it.

    huggingface_hub then has its cache in the folder `cache`, and no token.
    """
    import huggingface_hub
    from huggingface_hub import constants

    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.delenv("HF_TOKEN", raising=False)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield hub
        server.shutdown()
        server.server_close()
