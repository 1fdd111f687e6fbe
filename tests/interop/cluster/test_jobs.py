"""Every recipe's Job against the schema of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.deployments import pod_variables, pool_of
from tests.interop.cluster.jobs import DEPLOYMENTS, IMAGE, KUBERNETES, STANDALONE, base_template, rendered


def test_every_recipe_has_a_valid_kubernetes_job(tmp_path):
    for number, deployment in enumerate(DEPLOYMENTS):
        variables = deployment["job_variables"]
        job = rendered(variables)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "prefect-job" and container["args"] == ["prefect", "flow-run", "execute"]
        with_servers = deployment["entrypoint"].split(".")[-2] in ("train_vlm", "evaluate", "sweep")
        assert container["image"] == (STANDALONE if with_servers else IMAGE)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": variables["gpus"], "memory": variables["memory"]}
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(job))
    assert len(DEPLOYMENTS) > 10
    validate = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run(
        [validate, "--strict", *tmp_path.glob("*.yaml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_run_chooses_only_node_and_volumes():
    chosen = {"node_selector": {"gpu": "h200"}, "store_claim": "store-fast", "tolerations": [{"operator": "Exists"}]}
    pod = rendered(chosen)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"} and pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "store-fast"
    brought = {"env": {"LD_PRELOAD": "x"}, "service_account_name": "worker", "namespace": "default"}
    assert rendered(brought) == rendered({})


def test_run_cannot_use_platform_volumes():
    text = subprocess.check_output(["kubectl", "kustomize", KUBERNETES / "overlays/gpu"], text=True)
    documents = list(yaml.safe_load_all(text))
    claims = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    for each in documents:
        for claim in each.get("spec", {}).get("volumeClaimTemplates", []):
            claims.add(f"{claim['metadata']['name']}-{each['metadata']['name']}-0")
    allowed = Draft202012Validator(base_template()["variables"])
    assert claims == {"store", "mlflow", "prefect", "data-postgres-0"}
    assert {claim for claim in claims if allowed.is_valid({"store_claim": claim})} == {"store"}
    assert allowed.is_valid({"store_claim": "store-fast"}) and not allowed.is_valid({"store_claim": "store-"})


def test_run_uses_one_of_two_images():
    allowed = Draft202012Validator(base_template()["variables"])
    assert allowed.is_valid({"image": IMAGE}) and allowed.is_valid({"image": STANDALONE})
    assert not allowed.is_valid({"image": "registry.example/other"})


def test_run_that_joins_servers_needs_no_gpu_for_them():
    joined = load_recipe("train-vlm/qwen3-vl", ['machine.servers.endpoints=["http://vllm-0.vllm:8000"]'])
    alone = load_recipe("train-vlm/qwen3-vl")
    assert pod_variables(joined, base_template()) == {"image": IMAGE, "gpus": 1, "cpus": "6", "memory": "112Gi"}
    assert pod_variables(alone, base_template()) == {"image": STANDALONE, "gpus": 2, "cpus": "10", "memory": "136Gi"}
    assert pool_of(load_recipe("evaluate/alfworld", ['machine.servers.endpoints=["http://vllm-0.vllm:8000"]'])) == "cpu"


def test_outdated_job_template_is_an_error():
    template = json.loads(json.dumps(base_template()))
    del template["variables"]["properties"]["image"]
    with pytest.raises(ConfigurationError, match="two images"):
        pod_variables(load_recipe("train-vlm/colors"), template)


def test_worker_refuses_foreign_container():
    template = json.loads(json.dumps(base_template()).replace("prefect-job", "run"))
    with pytest.raises(ValueError, match="prefect-job"):
        asyncio.run(KubernetesWorkerJobConfiguration.from_template_and_values(base_job_template=template, values={}))
