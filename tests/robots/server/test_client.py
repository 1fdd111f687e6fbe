"""The client of policy servers: requests as openpi's client sends them, and every bad answer."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from websockets.server import ServerProtocol

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.evaluation.episode import EvaluationJournal
from armature.components.robots.evaluation.run import Evaluation
from armature.components.robots.evaluation.schedule import plan_episodes
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.server import client
from armature.components.robots.server.client import ServedPolicy
from armature.components.robots.server.wire import KEY
from tests.refusals import refused
from tests.robots.evaluation import playground
from tests.robots.libero.simulated import needs_libero, simulator
from tests.robots.server import conftest
from tests.robots.server.by_hand import encode
from tests.robots.server.openpi import HangUp, external, openpi_server

CAMERAS = ("observation.images.image", "observation.images.wrist_image")
CHUNK = np.arange(70, dtype=np.float64).reshape(10, 7)


def observation(number: int) -> RobotObservation:
    rng = np.random.default_rng(number)
    images = {name: rng.integers(0, 256, (8, 9, 3), np.uint8) for name in CAMERAS}
    return RobotObservation(images, rng.uniform(-1, 1, 8).astype(np.float32), f"task {number}")


def opened(url: str, steps: int | None = 5, rows: int = 1, **changes: Any) -> ServedPolicy:
    return ServedPolicy(external(url, **changes), CAMERAS, steps, rows)


def test_openpi_server_gets_its_fields_and_its_first_actions_are_executed():
    with openpi_server(lambda _: CHUNK, {"reset_pose": [0.0, 1.0]}) as (url, requests), opened(url, rows=3) as policy:
        chunks = policy.predict([observation(k) for k in range(3)], [7, 8, 9])
    assert chunks.dtype == np.float32 and np.array_equal(chunks, np.stack([CHUNK[:5]] * 3))
    assert not policy.seeded
    seen, request = observation(1), next(each for each in requests if each["prompt"] == "task 1")
    assert request.keys() == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    np.testing.assert_array_equal(request["observation/image"], seen.images[CAMERAS[0]])
    np.testing.assert_array_equal(request["observation/wrist_image"], seen.images[CAMERAS[1]])
    np.testing.assert_array_equal(request["observation/state"], seen.state)


def test_rows_get_their_own_answers_in_order():
    def answer(request: dict[str, Any]) -> Any:
        time.sleep(0.02 * (request["prompt"] == "task 0"))
        return np.full((5, 7), int(request["prompt"][5:]), np.float32)

    with openpi_server(answer) as (url, _), opened(url, rows=4) as policy:
        for _ in range(3):
            assert policy.predict([observation(k) for k in range(4)], range(4))[:, 0, 0].tolist() == [0, 1, 2, 3]


DESCRIBED = {name: {"dtype": "x"} for name in ("observation/image", "observation/wrist_image", "observation/state")}
SEEDED = {"observation": {**DESCRIBED, "prompt": {}, "seed": {"optional": True}}, "actions": {"shape": [10, 7]}}


def test_seed_is_sent_to_servers_that_describe_it():
    with openpi_server(lambda _: CHUNK, SEEDED) as (url, requests), opened(url, steps=None) as policy:
        assert policy.seeded and policy.n_action_steps == 10
        policy.predict([observation(0)], [2**62])
    assert requests[0]["seed"] == 2**62


@pytest.mark.parametrize(
    ("metadata", "steps", "code", "shown"),
    [
        ({}, None, "action_steps_missing", "evaluation.n_action_steps"),
        ({"actions": {"shape": [10, 6]}}, 5, "served_actions_mismatch", "[10, 6]"),
        ({"actions": {"shape": [4, 7]}}, 5, "served_actions_mismatch", "[4, 7]"),
        ({"observation": {**DESCRIBED, "prompt": {}, "depth": {}}}, 5, "served_fields_mismatch", "depth"),
        ({"observation": {"images": {}, "prompt": {}}}, 5, "served_fields_mismatch", "images"),
        ({"observation": {"\x1b[31m": {}, "x" * 10_000: {}}}, 5, "served_fields_mismatch", f" [31m, {'x' * 293}, and"),
        ("ValueError: \x1b[31mno weights", 5, "policy_server_error", "ValueError:  [31mno weights"),
        (b"\xc1", 5, "message_unreadable", "1 bytes"),
        (encode([1]), 5, "message_not_a_map", "list"),
    ],
    ids=["no-steps", "dimensions", "horizon", "needs-more", "other-names", "hostile-names", "error", "garbage", "list"],
)
def test_rejects_metadata_that_do_not_fit(metadata, steps, code, shown):
    with openpi_server(lambda _: CHUNK, metadata) as (url, _), refused(code, shown):
        opened(url, steps)


def fail(_: dict[str, Any]) -> Any:
    raise KeyError("observation/joints")


@pytest.mark.parametrize(
    ("answer", "code", "shown"),
    [
        (lambda _: CHUNK[:, :6], "served_actions_invalid", "[10, 6]"),
        (lambda _: CHUNK[:4], "served_actions_invalid", "[4, 7]"),
        (lambda _: CHUNK[None], "served_actions_invalid", "[1, 10, 7]"),
        (lambda _: CHUNK.astype(np.int32), "served_actions_invalid", "int32"),
        (lambda _: [[0.0] * 7] * 5, "served_actions_invalid", "list"),
        (lambda _: encode({"action": CHUNK}), "served_actions_invalid", "actions"),
        (lambda _: encode({"actions": CHUNK})[:-3], "message_unreadable", "frame"),
        (lambda _: encode({"actions": CHUNK}) + b"\x00", "trailing_bytes", "1 bytes"),
        (lambda _: bytes(client.LARGEST_ANSWER + 1), "served_message_too_large", client.LARGEST_ANSWER),
        (fail, "policy_server_error", "KeyError: 'observation/joints'"),
    ],
    ids=["dimensions", "horizon", "batch", "integers", "list", "missing", "cut", "trailing", "large", "traceback"],
)
def test_rejects_bad_answers(answer, code, shown):
    with openpi_server(answer) as (url, _), opened(url) as policy, refused(code, shown, url):
        policy.predict([observation(0)], [0])


def test_second_answer_to_a_request_is_not_taken_for_the_next_one():
    with openpi_server(lambda _: CHUNK, sent=2) as (url, _), opened(url) as policy:
        policy.predict([observation(0)], [0])
        with refused("served_message_unasked", url):
            for number in range(1, 50):  # the second answer may still be on its way
                time.sleep(0.01)
                policy.predict([observation(number)], [number])


def test_redirects_are_not_followed(monkeypatch):
    monkeypatch.setattr(client, "PAUSES", ())
    other = "ws://127.0.0.1:1"
    server, shown = openpi_server(lambda _: CHUNK, moved=other), f"status 302, a redirect to {other}"
    with server as (url, _), refused("policy_server_unreachable", url, shown):
        opened(url)


def test_silent_server_ends_in_a_timeout():
    with openpi_server(lambda _: None) as (url, _), opened(url, timeout_s=0.3, rows=2) as policy:
        began = time.monotonic()
        with refused("policy_timeout", "0.3 s", url):
            policy.predict([observation(0), observation(1)], [0, 1])
        assert time.monotonic() - began < 10


def test_server_that_restarts_is_asked_again_and_one_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(client, "PAUSES", (0.05, 0.05))
    lost = [True]

    def answer(_: dict[str, Any]) -> Any:
        if lost.pop() if lost else False:
            raise HangUp
        return CHUNK

    with openpi_server(answer) as (url, requests):
        policy = opened(url)
        np.testing.assert_array_equal(policy.predict([observation(0)], [0])[0], CHUNK[:5])
        assert len(requests) == 2
    with policy, refused("policy_server_unreachable", url):
        policy.predict([observation(0)], [0])


def test_server_that_restarts_with_another_policy_is_refused(monkeypatch):
    monkeypatch.setattr(client, "PAUSES", (0.05,))
    described = [{"policy": {"checkpoint": name}, "session": session} for session, name in enumerate("aab")]
    lost = [True]

    def answer(request: dict[str, Any]) -> Any:
        if request["prompt"] == "task 1" and lost:
            lost.clear()
            raise HangUp
        return CHUNK

    server = openpi_server(answer, lambda: described.pop(0))
    with server as (url, _), opened(url, rows=2) as policy, refused("served_policy_changed", "policy", url):
        policy.predict([observation(0), observation(1)], [0, 1])
    assert not described


@pytest.mark.parametrize("host", ["a" * 70, "gpu..box"])
def test_host_whose_name_is_invalid_is_named(monkeypatch, host):
    monkeypatch.setattr(client, "PAUSES", ())
    with refused("policy_server_unreachable", host):
        opened(f"ws://{host}:8000")


def test_request_that_is_too_large_for_the_server_is_not_called_a_large_answer(monkeypatch):
    monkeypatch.setattr(client, "PAUSES", ())
    server, shown = openpi_server(lambda _: CHUNK, max_size=100), client.TOO_LARGE
    with server as (url, _), opened(url) as policy, refused("policy_server_unreachable", shown, url):
        policy.predict([observation(0)], [0])


def test_server_that_reads_nothing_ends_in_a_timeout():
    """The images are larger than the buffers of the kernel, so neither the request nor the closing frame is sent."""
    connections = []

    def accept() -> None:
        connection, _ = listener.accept()
        connections.append(connection)
        protocol = ServerProtocol()
        protocol.receive_data(connection.recv(4096))
        protocol.send_response(protocol.accept(protocol.events_received()[0]))  # type: ignore[arg-type]
        protocol.send_binary(encode({}))
        connection.sendall(b"".join(protocol.data_to_send()))

    large = {name: np.zeros((2000, 2000, 3), np.uint8) for name in CAMERAS}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        with opened(url, timeout_s=0.5) as policy, refused("policy_timeout", url):
            policy.predict([RobotObservation(large, np.zeros(8, np.float32), "task")], [0])
        thread.join()
    connections[0].close()


@pytest.mark.parametrize("key", [None, "another-key-of-a-test"])
def test_key_is_sent_and_a_refused_one_is_named(monkeypatch, key):
    with openpi_server(lambda _: CHUNK, key="the-key-of-the-test") as (url, _):
        monkeypatch.delenv(KEY, raising=False)
        if key is not None:
            monkeypatch.setenv(KEY, key)
        with refused("policy_key_refused", KEY, url) as caught:
            opened(url)
        assert key is None or key not in str(caught.value)
        monkeypatch.setenv(KEY, "the-key-of-the-test")
        with opened(url) as policy:
            assert policy.predict([observation(0)], [0]).shape == (1, 5, 7)


def test_our_own_server_answers_with_the_bits_of_its_policy(policy, server, monkeypatch):
    monkeypatch.setenv(KEY, conftest.KEY)
    seen = [conftest.observation(conftest.message(k)) for k in range(3)]
    here = policy.predict(seen, [3, 4, 5])
    names = {"camera_fields": tuple(seen[0].images), "state_field": conftest.STATE}
    with ServedPolicy(external(server.url, **names), list(seen[0].images), None, rows=3) as served:
        assert served.seeded and served.n_action_steps == policy.n_action_steps
        np.testing.assert_array_equal(served.predict(seen, [3, 4, 5]), here)
        np.testing.assert_array_equal(served.predict(seen[1:2], [4])[0], here[1])


@pytest.mark.long
@needs_libero
def test_policy_plays_libero_with_the_same_actions_here_and_served(policy, server, monkeypatch, tmp_path):
    monkeypatch.setenv(KEY, conftest.KEY)
    names = [camera.removeprefix("observation.images.") for camera in (conftest.FRONT, conftest.WRIST)]
    cameras = dict(zip(("agentview", "robot0_eye_in_hand"), names, strict=True))
    fields = {"camera_fields": (conftest.FRONT, conftest.WRIST), "state_field": conftest.STATE}
    played = []
    with (
        ServedPolicy(external(server.url, **fields), fields["camera_fields"], None, rows=2) as served,
        SimulatorProcess(simulator(camera_name_mapping=cameras), timeout=300.0) as process,
    ):
        for number, (one, batch) in enumerate([(policy, 1), (served, 2), (served, 1)]):
            plan = playground.settings(tasks=(0,), episodes_per_task=2, max_steps={"libero_spatial": 8}, batch=batch)
            episodes = plan_episodes(plan, {"libero_spatial": suite_tasks("libero_spatial")})
            journal = EvaluationJournal(tmp_path / f"{number}.jsonl")
            played.append(Evaluation(plan, episodes, journal, lambda _all, _last: None).run(one, [process]))
    here, *there = ({key: outcome.actions.tobytes() for key, outcome in each.items()} for each in played)
    assert len(set(here.values())) == 2 and there == [here, here]
