"""A Ray cluster of this machine alone, for environments in which Ray is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from components.contracts.cluster import ClusterSettings


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterSettings]:
    """A head without CPUs, and one node that has them."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=16)
    yield ClusterSettings(address=made.address, num_cpus=0.5, start_timeout=60)
    import ray

    ray.shutdown()
    made.shutdown()
