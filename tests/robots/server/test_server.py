"""The policy server over real sockets: access, answers, errors and load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection

from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.server.settings import PolicyServerSettings
from tests.refusals import refused
from tests.robots.server.by_hand import decode, encode
from tests.robots.server.conftest import KEY, GatedPolicy, Running, ask, message, observation, running
from tests.robots.server.malformed import MALFORMED


def expected(policy: MolmoAct2Policy, fields: dict[str, Any], seed: int) -> bytes:
    """Return the actions that the policy predicts if it is called directly, without a server."""
    return policy.predict([observation(fields)], [seed])[0].tobytes()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


@contextmanager
def connected(server: Running, count: int = 1) -> Iterator[list[ClientConnection]]:
    """Open connections that have received the server's metadata."""
    with ExitStack() as opened:
        connections = [opened.enter_context(server.connect()) for _ in range(count)]
        for connection in connections:
            connection.recv(10)
        yield connections


def test_metadata_describes_observations_and_actions(server: Running) -> None:
    with server.connect() as connection:
        metadata = decode(connection.recv(10, decode=False))
    assert metadata["server"] == "armature" and metadata["policy"] == {"name": "tiny"}
    assert metadata["actions"] == {"dtype": "float32", "shape": [3, 7]}
    assert metadata["observation"]["observation.state"] == {"dtype": "float32", "shape": [8]}
    assert metadata["observation"]["observation.images.front"] == {"dtype": "uint8", "shape": [None, None, 3]}


def test_answers_equal_the_policy_for_requested_or_counted_seeds(server: Running, policy: MolmoAct2Policy) -> None:
    for _ in range(2):  # every connection counts from 0
        with connected(server) as (connection,):
            first, second = (ask(connection, message(number)) for number in (0, 1))
            chosen = ask(connection, message(1, seed=2**62 + 1))
            third = ask(connection, message(1))
        assert [answer["seed"] for answer in (first, second, chosen, third)] == [0, 1, 2**62 + 1, 3]
        assert first["actions"].dtype == np.float32 and first["actions"].shape == (3, 7)
        assert first["actions"].tobytes() == expected(policy, message(0), 0)
        assert second["actions"].tobytes() == expected(policy, message(1), 1)
        assert chosen["actions"].tobytes() == expected(policy, message(1), 2**62 + 1)
        assert third["actions"].tobytes() == expected(policy, message(1), 3) != second["actions"].tobytes()
    assert first["server_timing"].keys() == {"infer_ms", "wait_ms"}
    assert second["server_timing"].keys() == {"infer_ms", "wait_ms", "prev_total_ms"}


def test_malformed_messages_get_errors_and_do_not_break_the_connection(
    server: Running, policy: MolmoAct2Policy
) -> None:
    assert len(MALFORMED) >= 200
    refused = server.count("refused")
    wanted = expected(policy, message(50), 17)
    with connected(server) as (connection,):
        for number, (frame, named) in enumerate(MALFORMED):
            connection.send(frame)
            answer = connection.recv(10)
            assert isinstance(answer, str), f"number {number} was accepted: {frame[:80]!r}"
            assert named in answer, f"{answer!r} does not say {named!r}"
            assert "Traceback" not in answer and len(answer) < 700, answer
            if number % 10 == 0:
                assert ask(connection, message(50, seed=17))["actions"].tobytes() == wanted
        last = ask(connection, message(50))
    assert last["seed"] == -(-len(MALFORMED) // 10), "a refused message has no seed"
    assert server.count("refused") - refused == len(MALFORMED)


def test_too_large_message_only_closes_its_connection(gated: GatedPolicy) -> None:
    with running(gated, max_message_mib=1) as server, connected(server, 2) as (other, connection):
        connection.send(bytes(2**20 + 1))
        with pytest.raises(ConnectionClosedError) as closed:
            connection.recv(10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert ask(other, message(0))["seed"] == 0


def test_50_concurrent_clients_get_bitwise_equal_answers(policy: MolmoAct2Policy) -> None:
    clients, rounds = 50, 3
    with running(policy, batch=8) as server:
        with connected(server) as (connection,):
            alone = [ask(connection, message(client, seed=client))["actions"].tobytes() for client in range(clients)]
        barrier = threading.Barrier(clients)

        def play(client: int) -> list[bytes]:
            with connected(server) as (connection,):
                barrier.wait(60)
                return [ask(connection, message(client, seed=client))["actions"].tobytes() for _ in range(rounds)]

        with ThreadPoolExecutor(clients) as threads:
            together = list(threads.map(play, range(clients)))
        shared = server.metrics.registry.get_sample_value("armature_policy_batch_rows_sum")
        count = server.metrics.registry.get_sample_value("armature_policy_batch_rows_count")
    assert together == [[one] * rounds for one in alone]
    assert len(set(alone)) == clients
    assert shared is not None and count is not None and shared > 2 * count, "most were answered with others"


def test_requests_sent_ahead_are_answered_in_order(server: Running, policy: MolmoAct2Policy) -> None:
    with connected(server) as (connection,):
        for number in range(5):
            connection.send(encode(message(number)))
        answers = [decode(connection.recv(30, decode=False)) for _ in range(5)]
    assert [answer["seed"] for answer in answers] == [0, 1, 2, 3, 4]
    assert answers[4]["actions"].tobytes() == expected(policy, message(4), 4)


def test_waiting_requests_are_batched_and_a_full_queue_refuses(gated: GatedPolicy) -> None:
    with (
        running(gated, batch=4, max_waiting=6) as server,
        connected(server, 8) as connections,
        ThreadPoolExecutor(8) as threads,
    ):
        gated.calls.clear()
        gated.gate.clear()
        answers = [threads.submit(ask, connections[0], message(0, seed=0))]
        wait_for(lambda: gated.begun == 2)  # the first prediction is the server's check at the start
        answers += [threads.submit(ask, connections[each], message(each, seed=each)) for each in range(1, 7)]
        wait_for(lambda: server.waiting == 6)
        connections[7].send(encode(message(7)))
        refusal = connections[7].recv(10)
        assert isinstance(refusal, str) and refusal.startswith("busy, 6 waiting")
        gated.gate.set()
        seeds = [answer.result(30)["actions"][0, 1] for answer in answers]
        assert seeds == [0, 1, 2, 3, 4, 5, 6]
        assert gated.calls == [1, 4, 2]
        assert ask(connections[7], message(7))["seed"] == 0
        assert server.count("busy") == 1 and server.count("answered") == 8


def test_requests_of_disconnected_clients_are_dropped(gated: GatedPolicy) -> None:
    with running(gated, batch=1, max_waiting=2) as server, connected(server, 3) as connections:
        gated.calls.clear()
        gated.gate.clear()
        connections[0].send(encode(message(0)))
        wait_for(lambda: gated.begun == 2)  # the first prediction is the server's check at the start
        for connection in connections[1:]:
            connection.send(encode(message(0)))
        wait_for(lambda: server.waiting == 2)
        for connection in connections[1:]:
            connection.close()
        wait_for(lambda: server.waiting == 0)
        gated.gate.set()
        assert isinstance(connections[0].recv(10), bytes)
        assert len(gated.calls) == 1


def test_stopping_the_server_closes_connections(gated: GatedPolicy) -> None:
    with running(gated, batch=1) as server:
        gated.gate.clear()
        connections = [server.connect() for _ in range(3)]
        for connection in connections:
            connection.recv(10)
            connection.send(encode(message(0)))
        wait_for(lambda: server.waiting == 2)
        threading.Timer(0.3, gated.gate.set).start()
    for connection in connections:
        with pytest.raises(ConnectionClosed):
            connection.recv(10)
            connection.recv(10)


class Faulty(GatedPolicy):
    """A policy that fails for the tasks "raise", "nan" and "shape"."""

    def predict(self, observations: Any, seeds: Any) -> NDArray[np.float32]:
        actions = super().predict(observations, seeds)
        for each, chunk in zip(observations, actions, strict=True):
            if each.task == "raise":
                raise RuntimeError("secret of the machine")
            if each.task == "nan":
                chunk[1, 2] = np.nan
        return actions[:1, :1] if observations[0].task == "shape" else actions


def test_failing_request_does_not_affect_others_in_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    policy = Faulty()
    caplog.set_level(logging.CRITICAL)
    with (
        running(policy, batch=4) as server,
        connected(server, 4) as connections,
        ThreadPoolExecutor(4) as threads,
    ):
        policy.gate.clear()
        connections[0].send(encode(message(0)))
        wait_for(lambda: policy.begun == 2)
        prompts = ("wait", "raise", "nan")
        for connection, prompt in zip(connections[1:], prompts, strict=True):
            connection.send(encode(message(1, prompt=prompt)))
        wait_for(lambda: server.waiting == 3)
        policy.gate.set()
        good, raised, nan = threads.map(lambda connection: connection.recv(10), connections[1:])
        assert isinstance(good, bytes) and decode(good)["actions"][0, 2] == len("wait")
        assert isinstance(raised, str) and "the policy failed: RuntimeError" in raised and "secret" not in raised
        assert isinstance(nan, str) and "action 1 has nan in dimension 2" in nan
        assert server.count("failed") == 2


def test_healthz_follows_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    def health(url: str) -> int:
        return httpx.get(url.replace("ws:", "http:") + "/healthz", trust_env=False).status_code

    caplog.set_level(logging.CRITICAL)
    with running(Faulty()) as server, connected(server) as (connection,):
        assert health(server.url) == 200
        for prompt in ("raise", "shape"):
            connection.send(encode(message(0, prompt=prompt)))
            assert isinstance(connection.recv(10), str)
            assert health(server.url) == 503
            ask(connection, message(0))
            assert health(server.url) == 200


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "x", "é"])
def test_rejects_wrong_or_missing_key(key: str | None, server: Running) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        server.connect(key.encode().decode("latin-1") if key else key)
    assert refusal.value.response.status_code == 401 and b"Api-Key" in refusal.value.response.body
    assert KEY.encode() not in refusal.value.response.body


def test_key_must_be_in_the_authorization_header(server: Running) -> None:
    url = server.url.replace("ws:", "http:")
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    for header in ([("Authorization", f"Bearer {KEY}")], [("Authorization", f"Api-Key {KEY}")] * 2, [("Api-Key", KEY)]):
        answer = httpx.get(url, headers=[*upgrade.items(), *header], trust_env=False)
        assert answer.status_code == 401
    assert httpx.get(f"{url}/healthz", trust_env=False).text == "OK\n"
    assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 401


def test_rejects_browsers_without_a_key(server: Running, gated: GatedPolicy) -> None:
    with server.connect(origin="http://robot.example") as connection:
        connection.recv(10)
    with running(gated, key=None) as server:
        with pytest.raises(InvalidStatus) as refusal:
            server.connect(None, origin="http://evil.example")
        assert refusal.value.response.status_code == 403
        with server.connect(None) as connection:
            connection.recv(10)
            assert ask(connection, message(0))["seed"] == 0


def test_without_a_key_only_loopback_is_allowed(gated: GatedPolicy) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "robot.example"):
        assert not PolicyServerSettings(host=host).local
        with refused("key_missing", host), running(gated, key=None, host=host):
            pass
    assert all(PolicyServerSettings(host=host).local for host in ("127.0.0.1", "localhost", "::1"))


def test_broken_policy_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GatedPolicy):
        def predict(self, observations: Any, seeds: Any) -> NDArray[np.float32]:
            raise RuntimeError("no kernel")

    with caplog.at_level(logging.CRITICAL), refused("policy_failed", "RuntimeError"), running(Broken()):
        pass


def test_rejects_port_in_use(server: Running, gated: GatedPolicy) -> None:
    port = int(server.url.rpartition(":")[2])
    with refused("address_unavailable", f"127.0.0.1:{port}"), running(gated, port=port):
        pass
