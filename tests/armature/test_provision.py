"""Which deployments `armature up` sets: those of this folder's prefect.yaml, else all recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from armature.components.configuration import recipe_names
from armature.deployments import FLOWS, flow_of
from armature.provision import deployments_file


def test_without_a_file_every_recipe_is_a_deployment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = deployments_file()
    found = yaml.safe_load(written.read_text())["deployments"]
    assert [f"{each['tags'][0]}/{each['name']}" for each in found] == recipe_names()
    assert [each.name for each in tmp_path.iterdir()] == [".armature"]
    Path("prefect.yaml").write_text("deployments: []")
    assert deployments_file() == Path("prefect.yaml")


@pytest.mark.parametrize("name", FLOWS)
def test_a_worker_finds_each_flow_by_its_module(name):
    from prefect.flows import load_flow_from_entrypoint

    assert load_flow_from_entrypoint(FLOWS[name], use_placeholder_flow=False) is flow_of(name)
