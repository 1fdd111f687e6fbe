"""`armature serve-policy`: a program that a robot asks, and that goes when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from armature.components.contracts.robots import PreviousActions
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy, save_policy
from armature.components.robots.policies.player import open_flow_policy
from armature.serve_policy import KEY
from tests.robots.policies.molmoact2 import released
from tests.robots.server.by_hand import decode, encode
from tests.robots.server.conftest import STATE, ask, message, observation

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "armature", "serve-policy"]
MAY_BE_SENT = ", previous_actions, inference_delay"
NAMES = ("observation/image", "observation/wrist_image")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    settings = released.SETTINGS.model_copy(update={"norm_tag": "kitchen"})
    loaded: LoadedPolicy = load_policy(released.write_released(tmp_path / "released"), settings)
    return save_policy(tmp_path / "policy/checkpoint", loaded.parts, loaded.model.state_dict()).parent


def environment(**more: str) -> dict[str, str]:
    saved = {name: value for name, value in os.environ.items() if name != KEY}
    return {**saved, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with an answer on the CPU")
def test_serve_policy_answers_until_interrupted(checkpoint, tmp_path):
    options = ["--port", "0", "--metrics", "127.0.0.1:0", "--n-action-steps", "2", "--state", "observation/state"]
    options += [word for name in NAMES for word in ("--camera", name)]
    command = [*COMMAND, str(checkpoint), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True) as program:
        killer = threading.Timer(240, program.kill)
        killer.start()
        try:
            metrics = program.stdout.readline().split()[-1]
            output = [program.stdout.readline().strip() for _ in range(3)]
            url = output[0].removeprefix("serving at ").partition(";")[0]
            assert output[0].endswith(f"{', '.join(NAMES)}, observation/state, prompt, seed{MAY_BE_SENT}")
            file = tmp_path / ".armature/serve-policy.key"
            key = file.read_text()
            assert str(file.relative_to(tmp_path)) in output[1] and key not in "".join(output)
            assert file.stat().st_mode & 0o777 == 0o600
            with pytest.raises(InvalidStatus) as caught:
                connect(url)
            assert caught.value.response.status_code == 401
            fields = message(4)
            named = dict(zip((*NAMES, "observation/state", "prompt"), fields.values(), strict=True))
            with connect(url, additional_headers={"Authorization": f"Api-Key {key}"}) as connection:
                metadata = decode(connection.recv(decode=False))
                answer = ask(connection, {**named, "seed": 5})
                left = {"previous_actions": answer["actions"][1:], "inference_delay": 1}
                extended = ask(connection, {**named, "seed": 6, **left})
                connection.send(encode({**named, "observation/state": np.zeros(3, np.float32)}))
                assert "field 'observation/state'" in str(connection.recv())
            numbers = httpx.get(metrics, trust_env=False).text
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=60)
        finally:
            killer.cancel()
            program.kill()
    assert program.returncode == 0, errors
    assert metadata["policy"]["checkpoint"] == str(checkpoint) and metadata["actions"]["shape"] == [2, 7]
    ours = open_flow_policy(checkpoint, "continuous", rows=1, n_action_steps=2)
    assert answer["actions"].tobytes() == ours.predict([observation(fields)], [5])[0].tobytes()
    seen = replace(observation(fields), previous=PreviousActions(left["previous_actions"], 1))
    assert extended["actions"].tobytes() == ours.predict([seen], [6])[0].tobytes()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(numbers)
        for sample in family.samples
    }
    assert values["armature_policy_requests_total", "answered"] == 2
    assert values["armature_policy_requests_total", "refused"] == 1
    assert values["armature_policy_refused_keys_total",] == 1
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["key refused", "connected", "refused", "disconnected"]
    assert lines[2]["where"] == "field 'observation/state'" and lines[2]["client"] == lines[1]["client"]
    assert key not in errors and STATE not in errors


@pytest.mark.parametrize(
    ("options", "message", "key"),
    [
        (["--host", "0.0.0.0", "--no-key"], "without a key", None),
        (["--batch", "0"], "batch", None),
        (["--quantization", "int8"], "quantization", None),
        (["--metrics", "9464"], "metrics", None),
        ([], "code: unknown_checkpoint", None),
        (["."], "code: invalid_policy_key", "short"),
    ],
)
def test_rejects_invalid_options(options, message, key, tmp_path, monkeypatch, armature):
    monkeypatch.delenv(KEY, raising=False)
    if key:
        monkeypatch.setenv(KEY, key)
    checkpoint = [] if "." in options else ["nowhere"]
    done = armature("serve-policy", *checkpoint, *options)
    assert done.code in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
