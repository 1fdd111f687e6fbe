"""A Ray cluster of this machine alone, for environments in which Ray is installed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from armature.components.contracts.cluster import ClusterSettings

# Ray reads them when it is imported, which a test module may do first.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray head node without CPUs. Tests add nodes to it; joining requires its token."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="session")
def cluster(ray_cluster: Any) -> ClusterSettings:
    """Settings of a Ray cluster that has one node with CPUs, for workers that need little of it."""
    ray_cluster.add_node(num_cpus=16, resources={"steady": 100})
    return ClusterSettings(address=ray_cluster.address, num_cpus=0.5, resources={"steady": 1}, start_timeout=60)
