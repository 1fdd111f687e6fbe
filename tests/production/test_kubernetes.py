"""Prefect's real server, MLflow's, our provisioning and a real worker, started as the manifests start them, on a
stand-in for the cluster: a run becomes a Job, and what happens to the Job becomes the state of the run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State

from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.settings import LayoutSettings
from tests.production.stand_in_cluster import Cluster, Object, variables

ROOT = Path(__file__).parents[2]
SECRETS = {
    "postgres": {"PGPASSWORD": "password-of-postgres"},
    "prefect": {"PREFECT_API_AUTH_STRING": "armature:password-of-prefect"},
    "mlflow": {"PASSWORD": "password-of-mlflow", "COOKIE_KEY": "key-of-cookies"},
    "vllm": {"VLLM_API_KEY": "key-of-vllm"},
    "run": {"AWS_SECRET_ACCESS_KEY": "key-of-s3"},
}
PLATFORM, RUNS = Path(sys.executable).parent, ROOT / ".venv/bin"
PATIENCE = 1200.0
"""Time limit in seconds for an event. It is long because the machine may be busy, and no test depends on speed."""

pytestmark = pytest.mark.timeout(3 * PATIENCE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def until(true: Callable[[], Any], said: Callable[[], str]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (result := true()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)
    return result


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Node:
    """A node that runs containers as processes of this machine. Addresses and folders in the manifests are replaced by
    local ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kubernetes = ROOT / "infra/kubernetes"
        text = subprocess.check_output(["kubectl", "kustomize", kubernetes / "overlays/gpu"], text=True)
        self.documents: list[Object] = list(yaml.safe_load_all(text))
        self.prefect, self.mlflow, self.health = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
        accounts = (kubernetes / "base/basic_auth.ini").read_text().replace("/tmp/", f"{folder}/")
        (folder / "basic_auth.ini").write_text(accounts)
        self.here = {
            "http://prefect-server:4200": self.prefect,
            "http://mlflow:5000": self.mlflow,
            "postgresql+asyncpg://armature@postgres:5432/prefect": f"sqlite+aiosqlite:///{folder}/prefect.db",
            "postgresql+psycopg2://armature@postgres:5432/mlflow": f"sqlite:///{folder}/mlflow.db",
            "/etc/armature": str(kubernetes / "base"),
            "/etc/mlflow": str(folder),
            "/home/armature": str(folder / "prefect"),
            "/opt/armature": str(folder),
            "/var/lib/mlflow": str(folder / "mlartifacts"),
            "0.0.0.0": "127.0.0.1",
        }

    def find(self, kind: str, name: str) -> Object:
        (result,) = [each for each in self.documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        return result

    def start(
        self,
        container: Object,
        log: str,
        bin_folder: Path = PLATFORM,
        **more: str,
    ) -> subprocess.Popen[bytes]:
        words = {"4200": self.prefect.rpartition(":")[2], "--port=5000": f"--port={self.mlflow.rpartition(':')[2]}"}
        program, *arguments = (self.local(words.get(word, word)) for word in container["args"])
        home = self.folder / "home" / log
        home.mkdir(parents=True)
        environment = {name: self.local(value) for name, value in self.variables(container).items()}
        environment |= {"HOME": str(home), "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with (self.folder / log).open("wb") as output:
            command = [shutil.which(program, path=environment["PATH"]), *arguments]
            return subprocess.Popen(command, env=environment | more, cwd=self.folder, stdout=output, stderr=output)

    def variables(self, container: Object) -> dict[str, str]:
        return variables(container, self.documents, SECRETS)

    def local(self, text: str) -> str:
        for there, here in self.here.items():
            text = text.replace(there, here)
        return text

    def said(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")[-4000:]


@dataclass
class Platform:
    node: Node
    cluster: Cluster
    client: SyncPrefectClient

    def submit(self) -> UUID:
        """Start a flow run of quantile-stats/folder and return its id."""
        deployment = self.client.read_deployment_by_name("quantile-stats/folder")
        return self.client.create_flow_run_from_deployment(deployment.id).id

    def ended(self, run: UUID) -> State:
        """Wait until a flow run has ended, and return its final state."""
        return until(
            lambda: state if (state := self.client.read_flow_run(run).state).is_final() else None,
            lambda: f"{self.client.read_flow_run(run).state}\n{self.node.said('worker')}\n{self.cluster.refused}",
        )

    def job(self, run: UUID) -> Object:
        """Return the Kubernetes Job of a flow run."""
        return self.of_run("jobs", run)

    def pod(self, run: UUID) -> Object:
        return self.of_run("pods", run)

    def of_run(self, resource: str, run: UUID) -> Object:
        def found() -> list[Object]:
            objects = list(self.cluster.objects[resource].values())
            return [each for each in objects if each["metadata"]["labels"]["prefect.io/flow-run-id"] == str(run)]

        return until(found, lambda: f"{self.node.said('worker')}\n{self.cluster.refused}")[0]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    node = Node(tmp_path_factory.mktemp("node"))
    number = Feature(dtype="float32", shape=(2,), names=["x", "y"])
    features = {"observation.state": number, "action": number}
    layout = LayoutSettings(video=None)
    folder = node.folder / "data/lerobot"
    with create_dataset(folder, fps=10, robot_type="arm", features=features, layout=layout) as dataset:
        values = np.random.default_rng(0).random((20, 2), dtype=np.float32)
        dataset.add_episode(dict.fromkeys(features, values), "stay")
    cluster = Cluster(
        node.find("Role", "worker")["rules"],
        lambda pod: node.start(pod["spec"]["containers"][0], pod["metadata"]["name"], RUNS),
        node.said,
    )
    with ExitStack() as stack:

        def start(kind: str, name: str, bin_folder: Path = PLATFORM, **more: str) -> subprocess.Popen[bytes]:
            containers = node.find(kind, name)["spec"]["template"]["spec"]["containers"]
            process = node.start(containers[0], name, bin_folder, **more)
            stack.callback(stop, process)
            return process

        start("Deployment", "prefect-server")
        start("Deployment", "mlflow")
        for name, url in (("prefect-server", f"{node.prefect}/api/health"), ("mlflow", f"{node.mlflow}/health")):
            until(lambda url=url: answers(url), lambda name=name: node.said(name))
        assert start("Job", "provision", RUNS).wait() == 0, node.said("provision")
        kubeconfig = node.folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(access(stack.enter_context(cluster.serve()), cluster.token)))
        start(
            "Deployment",
            "worker",
            KUBECONFIG=str(kubeconfig),
            PREFECT_WORKER_QUERY_SECONDS="1",
            PREFECT_WORKER_WEBSERVER_PORT=node.health.rpartition(":")[2],
        )
        until(lambda: answers(f"{node.health}/health"), lambda: node.said("worker"))
        auth_string = SECRETS["prefect"]["PREFECT_API_AUTH_STRING"]
        with SyncPrefectClient(f"{node.prefect}/api", auth_string=auth_string) as client:
            yield Platform(node, cluster, client)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process as the kubelet does: with SIGTERM, and with SIGKILL after a grace period. Prefect's worker
    sometimes needs the SIGKILL."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    process.kill()
    process.wait()


def access(server: str, token: str) -> Object:
    """Return a kubeconfig for the API at `server`, with the worker's token."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "worker", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "worker", "namespace": "armature"}}],
        "current-context": "it",
    }


def test_kubernetes_run_becomes_a_job_that_completes(platform: Platform):
    run = platform.submit()
    assert platform.ended(run).is_completed(), platform.node.said(platform.pod(run)["metadata"]["name"])
    (container,) = platform.job(run)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "armature:0.2.0"
    environment = platform.node.variables(container)
    assert environment["PREFECT_API_AUTH_STRING"] == SECRETS["prefect"]["PREFECT_API_AUTH_STRING"]
    assert environment["AWS_SECRET_ACCESS_KEY"] == "key-of-s3" and environment["VLLM_API_KEY"] == "key-of-vllm"
    written = json.dumps(platform.cluster.objects["jobs"])
    assert not [value for each in SECRETS.values() for value in each.values() if value in written]


def test_mlflow_accepts_only_the_password_of_runs(platform: Platform):
    url = f"{platform.node.mlflow}/api/2.0/mlflow/experiments/search?max_results=100"
    refused = [httpx.get(url, auth=auth, trust_env=False).status_code for auth in (None, ("armature", "guess"))]
    answer = httpx.get(url, auth=("armature", SECRETS["mlflow"]["PASSWORD"]), trust_env=False)
    assert refused == [401, 401]
    assert "quantile-stats" in json.dumps(answer.raise_for_status().json())


def test_run_with_killed_pod_is_crashed(platform: Platform):
    run = platform.submit()
    name = platform.pod(run)["metadata"]["name"]
    until(lambda: name in platform.cluster.processes, lambda: platform.node.said("worker"))
    platform.cluster.processes[name].kill()
    assert platform.ended(run).is_crashed()


def test_run_with_deleted_pending_job_is_crashed(platform: Platform):
    platform.cluster.has_room = False
    run = platform.submit()
    name = platform.job(run)["metadata"]["name"]
    until(lambda: seen_by_the_observer(platform, run), lambda: platform.node.said("worker"))
    platform.cluster.delete(name)
    assert platform.ended(run).is_crashed()


def seen_by_the_observer(platform: Platform, run: UUID) -> bool:
    return platform.client.read_flow_run(run).state_name == "InfrastructurePending"


def test_worker_role_has_exactly_the_needed_rights(platform: Platform):
    rights = {
        (verb, group, resource)
        for rule in platform.cluster.rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert platform.cluster.asked == rights and not platform.cluster.refused


def test_stand_in_refuses_like_a_cluster(platform: Platform):
    job: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "a-"},
        "spec": {"template": {}},
    }
    job["spec"]["template"]["spec"] = {"restartPolicy": "Never", "containers": [{"name": "a", "imagee": "b"}]}
    with platform.cluster.serve() as url:
        token = {"Authorization": f"Bearer {platform.cluster.token}"}
        namespace = f"{url}/apis/batch/v1/namespaces/armature"
        answers = [
            httpx.post(f"{namespace}/jobs", json=job, headers=token, trust_env=False),
            httpx.get(f"{url}/api/v1/namespaces/armature/secrets", headers=token, trust_env=False),
            httpx.get(f"{namespace}/jobs", trust_env=False),
        ]
    assert [each.status_code for each in answers] == [422, 403, 401]
