"""The RayCluster of infra/kubernetes/ray, built by kubectl: Kubernetes' schemas judge its pods, Ray reads the rest."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.scripts.scripts import start

from armature.components.contracts.cluster import ClusterSettings

KUBERNETES = Path(__file__).parents[3] / "infra/kubernetes"
PINNED = KUBERNETES.parents[1] / "requirements/interop-ray.txt"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The manifests of the overlay `gpu` after the component `ray` was added to it, as a user would do."""
    site = tmp_path_factory.mktemp("site") / "kubernetes"
    shutil.copytree(KUBERNETES, site)
    file = site / "overlays/gpu/kustomization.yaml"
    file.write_text(file.read_text().replace("components:\n", "components:\n  - ../../ray\n"))
    text = subprocess.check_output(["kubectl", "kustomize", file.parent], text=True)
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def ray_cluster_object(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (result,) = (each for each in documents if each["kind"] == "RayCluster")
    return result


def groups(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]]


def validate(template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **template}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_ray_cluster_pods_are_valid(ray_cluster_object):
    for group in groups(ray_cluster_object):
        validate(group["template"])
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].startswith("armature:")
    wrong = copy.deepcopy(groups(ray_cluster_object)[0]["template"])
    wrong["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        validate(wrong)


def test_ray_accepts_the_manifest(ray_cluster_object):
    config = _derive_autoscaling_config_from_ray_cr(ray_cluster_object)
    head, workers = config["available_node_types"]["headgroup"], config["available_node_types"]["cpu"]
    assert head["resources"]["CPU"] == 0 and head["max_workers"] == 0
    assert (workers["min_workers"], workers["max_workers"]) == (1, 16)
    assert workers["resources"] == {"CPU": 16, "memory": 32 * 2**30}
    assert config["idle_timeout_minutes"] == 5
    assert f"ray=={ray_cluster_object['spec']['rayVersion']}" in PINNED.read_text().splitlines()


def test_manifest_parameters_are_ray_start_options(ray_cluster_object):
    existing = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    arguments = {name for group in groups(ray_cluster_object) for name in group["rayStartParams"]}
    assert arguments and arguments <= existing


def test_network_policies_connect_runs_cluster_and_servers(documents, ray_cluster_object):
    """KubeRay labels its pods with the cluster's name, and names the head's service by it."""
    name = ray_cluster_object["metadata"]["name"]
    policies = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "NetworkPolicy"}
    label = {"ray.io/cluster": name}
    assert policies["ray"]["podSelector"]["matchLabels"] == label
    sources = [each["podSelector"]["matchLabels"] for rule in policies["ray"]["ingress"] for each in rule["from"]]
    assert sources == [label, {"app.kubernetes.io/component": "run"}]
    for policy in ("ray-of-runs", "ray-of-vllm"):
        (rule,) = policies[policy]["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": label}}]
    assert ray_cluster_object["spec"]["authOptions"] == {
        "mode": "token"
    }  # the operator's secret has the cluster's name
    template = (KUBERNETES / "base/job-template.json").read_text()
    assert json.loads(template)["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ][-1] == {
        "name": "RAY_AUTH_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": name, "key": "auth_token", "optional": True}},
    }
    text = (KUBERNETES / "ray/raycluster.yaml").read_text()
    assert ClusterSettings(address=f"{name}-head-svc:6379").address in text
