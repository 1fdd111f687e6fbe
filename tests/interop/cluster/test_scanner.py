"""checkov over all that is applied to a cluster, with images by digest, and over every recipe's Job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.interop.cluster.jobs import DEPLOYMENTS, KUBERNETES, rendered

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")

CHECKOV = KUBERNETES.parents[1] / ".venv-checkov/bin/checkov"


def findings(folder: Path) -> tuple[dict[str, int], set[str]]:
    """Scan the manifests in `folder` with checkov. Return its summary and the ids of the checks that failed."""
    where = ["--config-file", KUBERNETES / "checkov.yaml", "--directory", folder, "--framework", "kubernetes"]
    command = [CHECKOV, *where, "--skip-download", "--soft-fail", "--compact", "--quiet", "--output", "json"]
    report: dict[str, Any] = json.loads(subprocess.check_output(command, text=True, cwd=folder))
    return report["summary"], {each["check_id"] for each in report["results"]["failed_checks"]}


def test_checkov_finds_no_failures(tmp_path):
    site, manifests = tmp_path / "kubernetes", tmp_path / "manifests"
    shutil.copytree(KUBERNETES, site)
    images = site / "images/kustomization.yaml"
    images.write_text(re.sub("newTag: .*", f"digest: sha256:{'0' * 64}", images.read_text()))
    manifests.mkdir()
    for overlay in ("gpu", "model", "cpu-smoke"):
        text = subprocess.check_output(["kubectl", "kustomize", site / "overlays" / overlay], text=True)
        (manifests / f"{overlay}.yaml").write_text(text)
    jobs = [rendered(each["job_variables"]) for each in DEPLOYMENTS]
    for number, job in enumerate(jobs):
        job["metadata"]["name"] = f"run-{number}"
    (manifests / "runs.yaml").write_text(yaml.safe_dump_all(jobs))
    summary, failed = findings(manifests)
    assert not failed and not summary["parsing_errors"]
    assert summary["passed"] > 1000


def test_checkov_finds_a_planted_fault(tmp_path):
    pod = {"containers": [{"name": "a", "image": "a", "securityContext": {"privileged": True}}]}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(document))
    assert "CKV_K8S_16" in findings(tmp_path)[1]
