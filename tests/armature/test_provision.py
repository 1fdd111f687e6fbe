"""Flows of deployments, as a worker finds them."""

from __future__ import annotations

import pytest

from armature.components.recipes import RECIPES
from armature.deployments import flow_of


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_worker_finds_each_flow_by_its_module(name):
    from prefect.flows import load_flow_from_entrypoint

    assert load_flow_from_entrypoint(RECIPES[name].FLOW, use_placeholder_flow=False) is flow_of(name)
