"""Networks that are gone: of a model server while it answers, and between the ranks of a training."""

from __future__ import annotations

import sys
from pathlib import Path

from armature.components.training.processes import RENDEZVOUS, private_folder
from tests.production.nodes import Network, wait_for
from tests.production.services import ONE_THREAD

ROOT = Path(__file__).parents[2]
SILENCE, MOST = 8, 30
"""Two times in seconds: `SILENCE`, after which a silent server counts as lost, and `MOST`, until which the request must
have failed."""
SERVER = """
import socket, time
with socket.create_server(("0.0.0.0", 8000)) as listener:
    kept = listener.accept()
    print("asked", flush=True)
    time.sleep(600)
"""
CLIENT = """
import asyncio, functools, sys, time
from armature.components.inference import client
from armature.components.inference.replies import Endpoint

async def main():
    client.socket_options = functools.partial(client.socket_options, float(sys.argv[2]))
    async with client.open_session() as session:
        await client.ask(session, Endpoint(sys.argv[1], ""), {"model": "policy"}, 600.0, 1000)

began = time.monotonic()
try:
    asyncio.run(main())
except client.TransientError as error:
    print(f"{error} after {time.monotonic() - began:.0f} s", flush=True)
"""
RANK = """
from datetime import timedelta
from armature.components.training import ranks
from armature.components.training.processes import TrainerProcesses

ranks.CONNECT = timedelta(seconds=5)
with ranks.joined(TrainerProcesses(threads=1), seed=0):
    raise AssertionError("they are cut off from each other")
"""


def test_unreachable_server_is_removed_from_the_pool(network: Network) -> None:
    server, client = network.add("server"), network.add("client")
    serving = server.start([sys.executable, "-c", SERVER])
    asking = client.start(
        [sys.executable, "-c", CLIENT, f"http://{server.address}:8000", str(SILENCE)], {"PYTHONPATH": str(ROOT)}
    )
    wait_for(lambda: "asked" in serving.tail(), asking, 60)
    with network.unplugged(server):
        assert asking.wait(MOST) == 0, asking.tail(60)
    output = asking.tail(5)
    print(output)
    assert "connection_lost: " in output and f"http://{server.address}:8000" in output


def test_ranks_that_cannot_connect_name_the_address(network: Network, tmp_path: Path) -> None:
    nodes = [network.add(name) for name in ("g", "h")]
    nodes[1].run(["ip", "route", "add", "blackhole", f"{nodes[0].address}/32"])
    meeting = {RENDEZVOUS: str(private_folder(tmp_path / "meeting") / "store"), "GLOO_SOCKET_IFNAME": "eth0"}
    variables = {**ONE_THREAD, **meeting, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    ranks = [node.start(["python", "-c", RANK], {**variables, "RANK": str(rank)}) for rank, node in enumerate(nodes)]
    for rank, (node, program) in enumerate(zip(nodes, ranks, strict=True)):
        assert program.wait(120) == 1
        assert f"rank {rank} of 2" in program.tail() and f"{node.name}, interface eth0" in program.tail()
