"""Rollouts of the environment `program`: real processes that ask a scripted policy through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from armature.components.contracts.rollouts import GenerateOutputs, TokenIds, Trajectory
from armature.components.environments.make import make_environment, refuse_ahead
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.client import Completion, GenerationFailure
from armature.components.inference.tool_calls import ToolFormat
from armature.components.rl.metrics import rollout_metrics
from armature.components.rollouts.collect import collect
from tests.builders import make_machine
from tests.environments.programs import ONE_TURN, program_args
from tests.refusals import refused

from .conftest import END, SAMPLING, ScriptedPolicy, tokens

NATIVE = ToolFormat(renders_tools=True, renders_results=True)
SAMPLED = 1000
"""Offset of sampled tokens: no tokenizer of text would make them."""


def rendered(messages: Sequence[Mapping[str, Any]], written: Mapping[str, TokenIds]) -> TokenIds:
    """Return the tokens of a chat. Answers that were sampled have the tokens of `written`, as from a server that keeps
    them."""
    parts = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content)
        sampled = written.get(text) if message["role"] == "assistant" else None
        parts += [tokens(f"<{message['role']}>"), tokens(text + "\n") if sampled is None else sampled]
    return np.concatenate([*parts, tokens("<assistant>")])


@dataclass
class ExactPolicy(ScriptedPolicy):
    """A policy from a script whose sampled tokens are none that text has, and which keeps them in later prompts."""

    tool_format: ToolFormat = field(default_factory=ToolFormat)
    offered: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)
    sampled: list[TokenIds] = field(default_factory=list)
    written: dict[str, TokenIds] = field(default_factory=dict)

    async def complete(self, messages: Any, sampling: Any, seed: int, tools: Any = ()) -> Completion:
        self.offered.append(tools)
        made = await super().complete(json.loads(json.dumps(messages)), sampling, seed)
        ids = np.append(made.token_ids[:-1] + SAMPLED, np.int32(END)).astype(np.int32)
        prompt = rendered(messages, self.written)
        self.sampled.append(ids)
        self.written[made.text] = ids
        return replace(made, prompt_token_ids=prompt, token_ids=ids)


def answers(*texts: str) -> Callable[..., str]:
    left = iter(texts)
    return lambda messages, seed: next(left)


@pytest.fixture
def play(tmp_path, store, events) -> Callable[..., GenerateOutputs]:
    def played(policy: ScriptedPolicy, source: str, group: int = 1, **changes: Any) -> GenerateOutputs:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        args = program_args(folder, source, **changes)
        settings = EnvironmentSettings(name="program", args=args)
        with closing(make_environment(settings, 1)) as environment:
            task = next(iter(environment.tasks("train")))
            return asyncio.run(
                collect(
                    environment,
                    [task],
                    group,
                    policy,
                    store,
                    SAMPLING,
                    step=1,
                    seed=0,
                    machine=make_machine(environment_timeout=60.0),
                    events=events,
                )
            )

    return played


def only(outputs: GenerateOutputs) -> Trajectory:
    assert not outputs.failures, outputs.failures
    (one,) = outputs.trajectories
    return one


RIGHT = ("left", "middle", "right")


def test_answer_of_a_program_is_graded(play) -> None:
    rewards = [only(play(ScriptedPolicy(answers(word)), ONE_TURN)) for word in RIGHT]
    assert sorted(one.reward for one in rewards) == [0.0, 0.0, 1.0]
    assert [len(one.turns[0].images) for one in rewards] == [1, 1, 1]
    assert not any(one.truncated for one in rewards)


def test_task_of_a_program_has_no_label(play) -> None:
    source = """
message([question])
right = task["images"] == ["image-0.png"] and task["prompt"] == task["row"]["question"] and "id" in task["row"]
right = right and {"image-0.png", "task.json"} <= set(os.listdir()) and "answer" not in task["row"]
finish(task["id"], reward=float(right))
"""
    one = only(play(ScriptedPolicy(answers("x")), source, program_weight=1.0))
    assert one.reward == 1.0


def test_own_reward_of_a_program(play) -> None:
    source = 'message([question]); print("noise"); finish("left", reward=0.25); print("more noise {")'
    one = only(play(ScriptedPolicy(answers("x")), source, rewards=[], program_weight=2.0))
    assert one.reward == 0.5


TOOLS = """
tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters":
    {"type": "object", "properties": {"box": {"type": "array"}}, "required": ["box"]}}}]
messages = [{"role": "system", "content": "Look first."}, question]
for turn in range(4):
    got = message(messages, tools=tools, max_tokens=9, temperature=0.3)
    messages.append(got)
    if not got.get("tool_calls"):
        break
    for call in got["tool_calls"]:
        box = json.loads(call["function"]["arguments"])["box"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": [
            {"type": "text", "text": str(sum(box))}, image_part(task["images"][0])]})
finish(got["content"])
"""


def call(*box: int) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"box": {list(box)}}}}}\n</tool_call>'


@pytest.mark.parametrize("form", [ToolFormat(), NATIVE], ids=["system-prompt", "template"])
def test_tools_of_a_program_and_exact_tokens(play, form) -> None:
    texts = [f"I look.\n{call(1, 2)}\n{call(3, 4)}", call(5), "left"]
    policy = ExactPolicy(answers(*texts), tool_format=form)
    one = only(play(policy, TOOLS))
    assert [turn.completion for turn in one.turns] == texts
    assert [[(each.name, each.status) for each in turn.tool_calls] for turn in one.turns] == [
        [("look", "program")] * 2,
        [("look", "program")],
        [],
    ]
    assert [len(turn.images) for turn in one.turns] == [1, 3, 4]
    for turn, sampled in zip(one.turns, policy.sampled, strict=True):
        assert turn.completion_token_ids.tolist() == sampled.tolist()
        assert min(sampled[:-1]) >= SAMPLED
    assert one.samples == 1
    for before, after in zip(one.turns, one.turns[1:], strict=False):
        recorded = [*before.prompt_token_ids, *before.completion_token_ids]
        assert after.prompt_token_ids[: len(recorded)].tolist() == recorded
    roles = [message["role"] for message in policy.requests[1][0]]
    if form is NATIVE:
        assert roles == ["system", "user", "assistant", "tool", "tool"]
        assert [each[0]["function"]["name"] for each in policy.offered] == ["look"] * 3
    else:
        assert roles == ["system", "user", "assistant", "user"]
        assert not any(policy.offered) and '"look"' in policy.requests[0][0][0]["content"]
    assert policy.requests[1][0][2]["content"] == texts[0]
    assert [len(json.loads(turn.messages)) for turn in one.turns] == [2, 2 if form is NATIVE else 1, 1]
    assert rollout_metrics(GenerateOutputs([one]))["tools/used"] == 1.0


def test_malformed_call_is_text_and_counted(play) -> None:
    one = only(play(ExactPolicy(answers("<tool_call>{", "left")), TOOLS))
    assert len(one.turns) == 1 and one.turns[0].tool_calls[0].status == "malformed"
    assert one.turns[0].completion == "<tool_call>{"


BRANCHES = """
history = [question, message([question]), user("Sure?")]
history.append(message(history))
message([question, user("Another way?")])                # a branch after the question
message([*history, user("Go on.")])                      # goes on with the first
message([question, {"role": "assistant", "content": "rewritten"}, user("Sure?")])
finish("left")
"""


def test_branches_and_rewritten_histories_are_samples_of_their_own(play) -> None:
    outputs = play(ExactPolicy(answers("a", "b", "c", "d", "e")), BRANCHES)
    one = only(outputs)
    assert [turn.completion for turn in one.turns] == ["a", "b", "c", "d", "e"]
    assert [any(turn.continues(each) for each in one.turns[: turn.index]) for turn in one.turns] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert rollout_metrics(outputs)["samples"] == 3.0


def test_server_that_tokenizes_answers_anew_makes_samples_of_their_own(play) -> None:
    policy = ExactPolicy(answers("a", "b", "c", "d", "e"))
    policy.written = type("Forgets", (dict,), {"__setitem__": lambda *_: None})()
    one = only(play(policy, BRANCHES))
    assert one.samples == 5
    assert [turn.completion_token_ids.tolist() for turn in one.turns] == [each.tolist() for each in policy.sampled]


def test_streamed_answers_are_the_same(play) -> None:
    source = """
chunks = [json.loads(line[6:]) for line in ask([question], stream=True, stream_options={"include_usage": True}, tools=[
    {"type": "function", "function": {"name": "look"}}]).splitlines() if line.startswith("data: {")]
deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
usage = chunks[-1]["usage"]
whole = "".join(delta.get("content") or "" for delta in deltas) + calls[0]["function"]["arguments"]
finish("", reward=float(usage["completion_tokens"]) * (whole == 'I {"box": [1]}'))
"""
    one = only(play(ExactPolicy(answers("I " + call(1))), source, rewards=[], program_weight=1.0))
    assert one.reward_parts == {"program": float(len("I " + call(1)) + 1)}


# --- Faults: at most one rollout is affected, and the reason is counted ---

ASKED = "message([question])\n"
FAULTS = {
    "hangs": (ASKED + "signal = __import__('signal'); signal.signal(15, signal.SIG_IGN); time.sleep(99)", "timeout"),
    "raises": (ASKED + "raise SystemError('broken')", "exit"),
    "is killed": (ASKED + "os.kill(os.getpid(), 9)", "exit"),
    "takes memory": (ASKED + "x = bytearray(2**34)", "exit"),
    "prints a bomb": (ASKED + "b = b'x' * 2**20\nwhile True: os.write(1, b)", "output"),
    "writes a bomb": (ASKED + "f = open('f', 'wb')\nwhile True: f.write(b'x' * 2**20)", "exit"),
    "prints nothing": (ASKED, "no_answer"),
    "prints garbage": (ASKED + "print('{\"answer\": ' + '[' * 10**5)", "no_answer"),
    "prints another type": (ASKED + 'print(\'{"answer": "left", "reward": "a lot"}\')', "bad_answer"),
    "prints no number": (ASKED + 'print(\'{"answer": "left", "reward": NaN}\')', "bad_answer"),
    "prints a surrogate": (ASKED + 'print(\'{"answer": "\\\\ud800"}\')', "bad_answer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_program_cost_reward_and_are_counted(play, fault) -> None:
    source, reason = FAULTS[fault]
    seconds = 1.5 if fault == "hangs" else 30.0
    one = only(play(ScriptedPolicy(answers("left")), source, timeout=seconds, max_output=2**22))
    assert one.reward == 0.0
    assert one.reward_parts[f"program_{reason}"] == 1.0


def test_waiting_for_completions_is_not_time_of_the_program(play) -> None:
    @dataclass
    class Slow(ScriptedPolicy):
        async def complete(self, *arguments: Any) -> Completion:
            await asyncio.sleep(3.0)
            return await super().complete(*arguments)

    one = only(play(Slow(answers("left")), ONE_TURN, timeout=2.5))
    assert "program_timeout" not in one.reward_parts


@pytest.mark.parametrize("source", ["finish('left')", "raise SystemError", "import no_such_module", "time.sleep(99)"])
def test_program_that_never_asks_is_a_failed_rollout(play, source) -> None:
    outputs = play(ScriptedPolicy(answers("left")), source, timeout=1.5)
    assert outputs.drops == {"no_completion": 1}


REFUSALS = {
    "n": ("code([question], n=2)", 400, "unsupported"),
    "logprobs": ("code([question], logprobs=True)", 400, "unsupported"),
    "format": ("code([question], response_format={'type': 'json_object'})", 400, "unsupported"),
    "model": ("code([question], model='gpt-4')", 404, "unknown_model"),
    "key": ("code([question], key='sk-another')", 401, "wrong_key"),
    "not JSON": ("code([], raw=b'{')", 400, "malformed_request"),
    "nested": ("code([], raw=b'[' * 10**6)", 400, "malformed_request"),
    "a list": ("code([], raw=b'[]')", 400, "malformed_request"),
    "no messages": ("code([])", 400, "malformed_request"),
    "no role": ("code([{'content': 'x'}])", 400, "malformed_request"),
    "tools": ("code([question], tools=[{'type': 'function'}])", 400, "malformed_request"),
    "audio": ("code([user({'type': 'input_audio'})])", 400, "bad_message"),
    "url": ("code([user({'type': 'image_url', 'image_url': {'url': 'file:///etc/passwd'}})])", 400, "bad_message"),
    "base64": (
        "code([user({'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,@@'}})])", 400, "bad_message",
    ),
    "no image": (
        "code([user({'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,AAAA'}})])", 400, "not_answered",
    ),
    "last": ("code([question, {'role': 'assistant', 'content': 'x'}])", 400, "bad_message"),
    "calls": (
        "code([question, {'role': 'tool', 'tool_call_id': 'call_0', 'content': 'x'}])", 400, "foreign_tool_calls",
    ),
}  # fmt: skip


def test_requests_that_are_not_supported_are_refused_and_counted(play) -> None:
    asked = ", ".join(f"({name!r}, {source})" for name, (source, _, _) in REFUSALS.items())
    wanted = {name: (status, code) for name, (_, status, code) in REFUSALS.items()}
    source = f"codes = dict([{asked}])\n{ASKED}finish('', reward=float(codes == {wanted}))"
    one = only(play(ScriptedPolicy(answers("left")), source, rewards=[], program_weight=1.0))
    assert one.reward == 1.0 and len(one.turns) == 1
    codes = [code for _, _, code in REFUSALS.values()]
    assert {name: value for name, value in one.reward_parts.items() if name.startswith("refused_")} == {
        f"refused_{code}": float(codes.count(code)) for code in codes
    }


IMAGES = """
import io, zlib, struct
def png(width, height, depth, color, rows):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\\x89PNG\\r\\n\\x1a\\n" + body
def shown(data):
    data = base64.b64encode(data).decode()
    return user({"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}})
gray = png(28, 28, 16, 0, (b"\\0" + b"\\x12\\x34" * 28) * 28)
first = message([shown(gray)])["content"]
huge = code([shown(png(30000, 30000, 8, 2, b"\\0"))])
finish(first if huge == (400, "not_answered") else "huge: " + str(huge))
"""


def test_image_of_another_mode_is_shown_and_a_huge_one_refused(play) -> None:
    outputs = [play(ScriptedPolicy(answers(word)), IMAGES) for word in RIGHT]
    assert sorted(only(each).reward for each in outputs) == [0.0, 0.0, 1.0]
    assert {(ref.width, ref.height) for each in outputs for ref in only(each).turns[0].images} == {(28, 28)}


def test_limit_of_completions_and_refusals_of_the_server(play) -> None:
    source = "for _ in range(2): message([question])\nfinish('left', reward=float(code([question])[0]))"
    one = only(play(ScriptedPolicy(answers("a", "b", "c")), source, max_turns=2, program_weight=1.0))
    assert len(one.turns) == 2 and not one.truncated
    assert one.reward_parts["program"] == 400.0
    assert one.reward_parts["refused_no_completions_left"] == 1.0

    def too_long(messages: Sequence[Mapping[str, Any]], seed: int) -> str:
        if len(messages) > 1:
            raise GenerationFailure("too long", reason="prompt_too_long")
        return "left"

    source = ASKED + "finish('left', reward=float(code([question, question])[0]))"
    one = only(play(ScriptedPolicy(too_long), source, rewards=[], program_weight=1.0))
    assert [turn.reward for turn in one.turns] == [400.0]


def test_one_bad_member_does_not_affect_its_group(play, tmp_path) -> None:
    source = f"""
first = {str(tmp_path)!r} + "/first"
try:
    os.mkdir(first)
except FileExistsError:
    finish(message([question])["content"])
else:
    open(first + "/key", "w").write(os.environ["OPENAI_API_KEY"])
    message([question])
    os._exit(3)
"""
    outputs = play(ScriptedPolicy(lambda messages, seed: "left"), source, group=4)
    assert len(outputs.trajectories) == 4
    assert rollout_metrics(outputs)["reward_parts/program_exit"] == 0.25


def test_nothing_of_a_program_is_left(play, tmp_path) -> None:
    pids = tmp_path / "pids"
    source = f"""
message([question])
for daemon in (False, True):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=daemon)
    open({str(pids)!r}, "a").write(f"{{child.pid}} ")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(pids)!r}, "a").write(f"{{os.getpid()}} ")
        time.sleep(600)
    os._exit(0)
time.sleep(0.5)
open({str(pids)!r}, "a").write(os.getcwd())
finish("left")
"""
    only(play(ScriptedPolicy(answers("left")), source))
    *numbers, folder = pids.read_text().split()
    assert len(numbers) == 3
    assert not any(psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie" for pid in numbers)
    assert not Path(folder).exists()


def test_program_ends_with_the_process_that_started_it(tmp_path) -> None:
    settings = {"name": "program", "args": program_args(tmp_path, "print(os.getpid())\ntime.sleep(600)")}
    script = f"""
import asyncio, json
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
environment = make_environment(EnvironmentSettings.model_validate({settings!r}), 1)
asyncio.run(environment.episode(next(iter(environment.tasks("train")))).reset())
"""
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as running:
        deadline = time.monotonic() + 60
        agents: list[psutil.Process] = []
        while not agents and time.monotonic() < deadline:
            family = psutil.Process(running.pid).children(recursive=True)
            agents = [each for each in family if str(tmp_path / "agent.py") in each.cmdline()[1:2]]
            time.sleep(0.1)
        os.kill(running.pid, signal.SIGKILL)
    assert agents
    psutil.wait_procs(agents, timeout=20)
    assert not any(each.is_running() for each in agents)


# --- Functions and settings ---


def test_function_is_a_program(play, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ARMATURE_PROJECT", str(tmp_path))
    (tmp_path / "agents.py").write_text(
        "import json, os, urllib.request\n"
        "async def solve(task):\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': task['prompt']}]}).encode()\n"
        "    headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as got:\n"
        "        return json.load(got)['choices'][0]['message']['content']\n"
    )
    one = only(play(ScriptedPolicy(answers("neither")), "", command=[], function="agents:solve"))
    assert one.reward_parts == {"exact_match": 0.0, "program": 0.0}


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        pytest.param({"command": []}, "command_or_function", "", id="neither"),
        pytest.param({"function": "a:b"}, "command_or_function", "", id="both"),
        pytest.param({"rewards": []}, "nothing_graded", "", id="no reward"),
        pytest.param({"command": ["no-such-program"]}, "program_missing", "no-such-program", id="no program"),
        pytest.param({"command": [], "function": "no_such:f"}, "module_missing", "no_such", id="no module"),
    ],
)
def test_settings_of_a_program_are_checked_ahead(tmp_path, changes, code, value) -> None:
    with refused(code, value):
        settings = EnvironmentSettings(name="program", args=program_args(tmp_path, **changes))
        refuse_ahead(settings, "", 1, 0)


def test_recipe_cannot_add_tools_to_a_program(tmp_path) -> None:
    settings = EnvironmentSettings(name="program", args=program_args(tmp_path), tools=("zoom",))
    with refused("tools_of_program", "program"):
        make_environment(settings)


def test_code_of_a_program_is_a_source(tmp_path) -> None:
    from armature.components.environments.make import environment_sources

    settings = EnvironmentSettings(name="program", args=program_args(tmp_path))
    before = environment_sources(settings)
    program_args(tmp_path, "finish('other')")
    changed = {name for name, digest in environment_sources(settings).items() if digest != before.get(name)}
    assert changed == {"program"}
