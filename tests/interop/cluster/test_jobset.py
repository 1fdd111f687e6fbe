"""The JobSets of trainings on several nodes, against JobSet's schema."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import kubernetes_validate
import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.job_variables import parse_job_variables
from armature.jobset import jobset
from tests.interop.cluster.jobs import IMAGE, base_template, refuse_invalid, rendered

NAME, THREE = "train-vla/molmoact2", ["machine.trainer_nodes=3", "machine.trainer_interface=eth0"]


def made(*more: str) -> dict[str, Any]:
    values = [*THREE, *more]
    return jobset(load_recipe(NAME, values), NAME, values, base_template())


def test_its_pods_are_those_of_a_run_and_of_nodes_that_join():
    it = made("training.micro_batch_size=16")
    refuse_invalid(it)
    first, others = (each["template"]["spec"] for each in it["spec"]["replicatedJobs"])
    assert (first["completions"], others["completions"]) == (1, 2)
    run, alone = first["template"]["spec"], rendered({"gpus": 8, "cpus": "50", "memory": "784Gi"})["spec"]["template"]
    (container,) = run["containers"]
    assert container["image"] == IMAGE and container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert run["volumes"] == alone["spec"]["volumes"] and run["securityContext"] == alone["spec"]["securityContext"]
    assert first["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "run"
    command = container["args"][container["args"].index("first") + 1 :]
    assert command == ["python", "-m", "armature", "run", NAME, *(f"--set={each}" for each in THREE), command[-1]]
    assert command[-1] == "--set=training.micro_batch_size=16"
    assert made()["metadata"]["name"] != it["metadata"]["name"]


def test_its_pods_have_the_variables_that_are_given():
    texts = ["node_selector.gpu=h200", "store_claim=store-fast", "shared_memory=32Gi"]
    variables = parse_job_variables(texts, base_template(), "train-gpu")
    it = jobset(load_recipe(NAME, THREE), NAME, THREE, base_template(), variables)
    refuse_invalid(it)
    for each in it["spec"]["replicatedJobs"]:
        pod = each["template"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"gpu": "h200"} and pod["volumes"][1]["emptyDir"]["sizeLimit"] == "32Gi"
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "store-fast"


@pytest.mark.parametrize("where", ["spec", "failurePolicy", "container"])
def test_a_field_that_is_not_of_a_jobset_is_refused(where: str):
    wrong = deepcopy(made())
    job = wrong["spec"]["replicatedJobs"][0]["template"]["spec"]
    parts = {
        "spec": wrong["spec"],
        "failurePolicy": wrong["spec"]["failurePolicy"],
        "container": job["template"]["spec"]["containers"][0],
    }
    parts[where]["replicas_"] = 1
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        refuse_invalid(wrong)


def test_what_cannot_be_a_jobset_is_refused():
    with pytest.raises(ConfigurationError, match="trainer_nodes = 1"):
        jobset(load_recipe(NAME), NAME, [], base_template())
    with pytest.raises(ConfigurationError, match="from their beginning again"):
        made("machine.force=['train-vla']")
