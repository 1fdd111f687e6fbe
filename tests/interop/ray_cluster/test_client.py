"""A run outside of the cluster, which joins it by ray://."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

from armature.components.machine.process import Program

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from armature.components.contracts.cluster import ClusterSettings, ServerBundle
from armature.components.contracts.errors import ConfigurationError, ServerError
from armature.components.machine.workers.actor import WorkerActor
from armature.components.machine.workers.requests import ANYTHING
from armature.components.machine.workers.placed import NodeActor, PlacedProgram, PlacementBundles

place = ClusterSettings(address=sys.argv[1], num_cpus=0.5, start_timeout=60)
try:
    with WorkerActor(place, "tests.machine.workers.misbehaving", timeout=60.0) as worker:
        print("the worker answers", worker.call("add", 1, reply=ANYTHING), flush=True)
except ConfigurationError as error:
    print(error, flush=True)
    sys.exit(3)
places = PlacementBundles(place, ServerBundle(num_cpus=1), 1)
program = PlacedProgram(places, 0, NodeActor, ServerError)
with program.starting() as stopped:
    program.place(stopped)
    program.run("start", [sys.executable, "-c", "raise SystemExit(7)"], sys.argv[2], {})
while program.alive:
    pass
print("the program ended with", program.returncode, flush=True)
program.stop()
places.close()
"""


def test_ray_starts_workers_and_programs(ray_cluster, cluster, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as result:
        port = result.getsockname()[1]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ray.util.client.server", f"--address={ray_cluster.address}", f"--port={port}"]
    server = Program([*command, "--host=127.0.0.1", "--mode=legacy"], log=tmp_path / "server.log", env=path)
    deadline = time.monotonic() + 60
    while not re.search("Starting Ray Client server", server.tail(100)):
        assert server.returncode is None and time.monotonic() < deadline, server.tail()
        time.sleep(0.1)
    run = Program(
        [sys.executable, "-c", RUN, f"ray://127.0.0.1:{port}", tmp_path / "program.log"], log=tmp_path / "log", env=path
    )
    try:
        assert run.wait(120) == 0, run.tail(60)
        assert run.tail().splitlines()[-2:] == ["the worker answers 1", "the program ended with 7"]
    finally:
        server.stop()
