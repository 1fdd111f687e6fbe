"""A stand-in for a cluster: the part of Kubernetes' API that Prefect's worker speaks, and a node that runs Jobs.

Jobs are validated against Kubernetes' own schemas, strictly, and the bearer of the token may do what the worker's Role
says. A pod is a process of this machine, with the variables that its ConfigMaps and Secrets give it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from subprocess import Popen
from typing import Any

import kubernetes_validate
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

Object = dict[str, Any]
NAMESPACE = "armature"
VERSIONS = {"pods": "v1", "jobs": "batch/v1"}
KINDS = {"pods": "Pod", "jobs": "Job"}
SERVED = {
    "v1": {"namespaces": "Namespace", "pods": "Pod"},
    "batch/v1": {"jobs": "Job"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
}
"""Resource kinds in API discovery. Kopf, the worker's observer, waits for all of them before it watches."""
POLL = 0.1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def variables(container: Object, documents: list[Object], secret: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the environment variables of a container. `documents` are the manifests, and `secret` has the secrets by
    name.

    Raises:
        KeyError: the container needs a ConfigMap or a secret that does not exist.
    """
    named = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
    result: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            result |= named[source["configMapRef"]["name"]]
        elif source["secretRef"]["name"] in secret or not source["secretRef"].get("optional"):
            result |= secret[source["secretRef"]["name"]]
    for each in container.get("env", []):
        origin = each.get("valueFrom", {})
        if "fieldRef" in origin:
            result[each["name"]] = {"metadata.namespace": NAMESPACE}[origin["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in origin:
            reference = origin["secretKeyRef"]
            if reference["name"] in secret or not reference.get("optional"):
                result[each["name"]] = secret[reference["name"]][reference["key"]]
        else:
            result[each["name"]] = each["value"]
    return result


@dataclass
class Cluster:
    """A stand-in for a Kubernetes cluster: its API server, and the processes of its pods.

    Args:
        rules: the rules of the worker's Role, which decide the requests that the API allows.
        run: starts the first container of a pod as a process.
        log: returns the log of the pod with the given name.
    """

    rules: list[Object]
    run: Callable[[Object], Popen[bytes]]
    log: Callable[[str], str]
    token: str = field(default_factory=secrets.token_hex)
    has_room: bool = True
    asked: set[tuple[str, str, str]] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    objects: dict[str, dict[str, Object]] = field(default_factory=lambda: {each: {} for each in KINDS})
    processes: dict[str, Popen[bytes]] = field(default_factory=dict)
    _watchers: dict[asyncio.Queue[Object], str] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _version: int = 0
    _loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the cluster's API while the block runs, and yield its address."""
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE", "PATCH", "PUT"])])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                threading.Event().wait(POLL)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()
            for process in self.processes.values():
                process.kill()

    async def _answer(self, request: Request) -> Response:
        parts = request.url.path.strip("/").split("/")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return self._failure(401, "Unauthorized", request)
        path = "/".join(parts)
        if path in ("api", "apis") or path.partition("/")[2] in SERVED:
            return self._discovery(path)
        if len(parts) < 3:
            return failure(404, "NotFound")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
        if rest[:2] != ["namespaces", NAMESPACE] or len(rest) < 3:
            return self._failure(403, "Forbidden", request)
        resource, name, part = (*rest[2:], None, None)[:3]
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}.get(request.method, "get")
        if verb == "get" and name is None:
            verb = "watch" if request.query_params.get("watch") == "true" else "list"
        what = f"{resource}/{part}" if part else str(resource)
        self.asked.add((verb, group, what))
        if not any(verb in r["verbs"] and group in r["apiGroups"] and what in r["resources"] for r in self.rules):
            return self._failure(403, "Forbidden", request)
        if verb == "create":
            return self._create(await request.json(), request)
        if verb == "watch":
            return StreamingResponse(self._watch(str(resource), request), media_type="application/json")
        if verb == "list":
            result = [each for each in self.objects[str(resource)].values() if selected(each, request)]
            kind = f"{KINDS[str(resource)]}List"
            metadata = {"resourceVersion": str(self._version)}
            return JSONResponse(
                {"apiVersion": VERSIONS[str(resource)], "kind": kind, "metadata": metadata, "items": result}
            )
        if name not in self.objects[str(resource)]:
            return failure(404, "NotFound")
        if part == "log":
            return PlainTextResponse(self.log(str(name)))
        return JSONResponse(self.objects[str(resource)][str(name)])

    def _failure(self, code: int, reason: str, request: Request, message: str = "") -> Response:
        self.refused.append(f"{code} {request.method} {request.url.path} {message}".strip())
        return failure(code, reason, message)

    def _discovery(self, path: str) -> Response:
        if path == "api":
            return JSONResponse({"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            versions = [{"groupVersion": each, "version": each.partition("/")[2]} for each in SERVED if "/" in each]
            groups = [
                {"name": each["groupVersion"].partition("/")[0], "versions": [each], "preferredVersion": each}
                for each in versions
            ]
            return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        version = path.partition("/")[2]
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {"name": name, "singularName": kind.lower(), "namespaced": name in KINDS, "kind": kind, "verbs": verbs}
            for name, kind in SERVED[version].items()
        ]
        return JSONResponse(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        )

    def _create(self, made: Object, request: Request) -> Response:
        metadata = made["metadata"]
        metadata["name"] = metadata["generateName"] + secrets.token_hex(3)
        try:
            kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            return self._failure(422, "Invalid", request, str(error))
        metadata |= {"namespace": NAMESPACE, "uid": secrets.token_hex(), "creationTimestamp": now()}
        made["status"] = {}
        self._put("ADDED", "jobs", made)
        task = asyncio.create_task(self._start(made))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse(made, status_code=201)

    async def _start(self, job: Object) -> None:
        self._loop = asyncio.get_running_loop()
        template, owner = job["spec"]["template"], job["metadata"]["name"]
        labels = template["metadata"]["labels"] | {"job-name": owner, "batch.kubernetes.io/job-name": owner}
        name = f"{owner}-{secrets.token_hex(3)}"
        metadata = {"name": name, "namespace": NAMESPACE, "uid": secrets.token_hex(), "creationTimestamp": now()}
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": job["metadata"]["uid"]}
        metadata |= {"labels": labels, "ownerReferences": [reference]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self._put("ADDED", "pods", pod | {"status": {"phase": "Pending"}})
        while not self.has_room and name in self.objects["pods"]:
            await asyncio.sleep(POLL)
        if name not in self.objects["pods"]:
            return
        process = self.processes[name] = self.run(pod)
        self._put("MODIFIED", "pods", pod | {"status": {"phase": "Running", "startTime": now()}})
        while process.poll() is None:
            await asyncio.sleep(POLL)
        if name not in self.objects["pods"]:
            return
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        (arguments,) = template["spec"]["containers"]
        container = {
            "name": arguments["name"],
            "image": arguments["image"],
            "imageID": arguments["image"],
            "ready": False,
        }
        container["restartCount"] = 0
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [container | {"state": {"terminated": ended}}],
        }
        self._put("MODIFIED", "pods", pod | {"status": status})
        condition = {"type": "Failed" if code else "Complete", "status": "True", "lastTransitionTime": now()}
        if code:
            condition |= {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
        self._put(
            "MODIFIED", "jobs", job | {"status": {"conditions": [condition], "failed" if code else "succeeded": 1}}
        )

    def delete(self, job: str) -> None:
        """Delete a Job and its pods, as `kubectl delete job` does."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._delete, job)

    def _delete(self, job: str) -> None:
        self._put("DELETED", "jobs", self.objects["jobs"].pop(job))
        for name, pod in list(self.objects["pods"].items()):
            if pod["metadata"]["labels"]["job-name"] == job:
                self._put("DELETED", "pods", self.objects["pods"].pop(name))
                if name in self.processes:
                    self.processes[name].terminate()

    def _put(self, event: str, resource: str, changed: Object) -> None:
        self._version += 1
        metadata = changed["metadata"] | {"resourceVersion": str(self._version)}
        changed = changed | {"metadata": metadata}
        if event != "DELETED":
            self.objects[resource][metadata["name"]] = changed
        for queue, watched in self._watchers.items():
            if watched == resource:
                queue.put_nowait({"type": event, "object": changed})

    async def _watch(self, resource: str, request: Request) -> AsyncIterator[str]:
        queue: asyncio.Queue[Object] = asyncio.Queue()
        self._watchers[queue] = resource
        since = int(request.query_params.get("resourceVersion") or 0)
        for each in self.objects[resource].values():  # what changed between the list and this
            if int(each["metadata"]["resourceVersion"]) > since:
                queue.put_nowait({"type": "MODIFIED", "object": each})
        try:
            while not await request.is_disconnected():
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(queue.get(), 1)
                    if selected(event["object"], request):
                        yield json.dumps(event) + "\n"
        finally:
            del self._watchers[queue]


def failure(code: int, reason: str, message: str = "") -> Response:
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return JSONResponse(status | {"message": message or reason}, status_code=code)


def selected(each: Object, request: Request) -> bool:
    """Return True if an object has the labels that the query parameter `labelSelector` of the request requires."""
    labels = each["metadata"].get("labels", {})
    terms = [term for term in request.query_params.get("labelSelector", "").split(",") if term]
    return all(
        labels.get(key) == value if equal else key in labels for key, equal, value in (t.partition("=") for t in terms)
    )
