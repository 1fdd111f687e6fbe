"""A Ray cluster of this machine: a head without CPUs, and nodes that tests add and kill."""

from __future__ import annotations

from tests.machine.workers.conftest import cluster, ray_cluster

__all__ = ["cluster", "ray_cluster"]
