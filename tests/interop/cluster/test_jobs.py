"""Every recipe's Job against the schema of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from tests.interop.cluster.jobs import DEPLOYMENTS, IMAGE, base_template, rendered


def test_every_recipe_has_a_valid_job_with_its_gpus_and_memory(tmp_path):
    for number, deployment in enumerate(DEPLOYMENTS):
        variables = deployment["work_pool"]["job_variables"]
        job = rendered(variables)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "prefect-job" and container["args"] == ["prefect", "flow-run", "execute"]
        assert container["image"] == IMAGE
        assert container["resources"]["limits"] == {"nvidia.com/gpu": variables["gpus"], "memory": variables["memory"]}
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(job))
    assert len(DEPLOYMENTS) > 10
    validate = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run(
        [validate, "--strict", *tmp_path.glob("*.yaml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_run_chooses_its_node_and_volumes_and_nothing_else():
    chosen = {"node_selector": {"gpu": "h200"}, "store_claim": "fast", "tolerations": [{"operator": "Exists"}]}
    pod = rendered(chosen)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"} and pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fast"
    brought = {"image": "other", "env": {"LD_PRELOAD": "x"}, "service_account_name": "worker", "namespace": "default"}
    assert rendered(brought) == rendered({})


def test_the_worker_refuses_another_container():
    template = json.loads(json.dumps(base_template()).replace("prefect-job", "run"))
    with pytest.raises(ValueError, match="prefect-job"):
        asyncio.run(KubernetesWorkerJobConfiguration.from_template_and_values(base_job_template=template, values={}))
