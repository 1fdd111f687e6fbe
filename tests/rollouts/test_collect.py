"""Collecting: what a rollout records, and what becomes of rollouts that fail."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.videos import decode_video
from armature.components.contracts.episodes import Environment, Observation, Outcome, Split, Task
from armature.components.contracts.errors import ServerError, StoreError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.inference.client import GenerationFailure
from armature.components.rollouts.collect import allow_open_files, collect
from tests.builders import make_machine
from tests.images import other_images, refused_images, turned_images
from tests.models.clips import clip

from .conftest import SAMPLING, RecordedEvents, Script, ScriptedPolicy


def png(shade: int, size: int = 8, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 0, 0)).save(buffer, format)
    return buffer.getvalue()


class Counting:
    """An environment that shows an image with the shade `payload["shade"]` and asks for `turns` answers.

    Each answer "yes" adds 1 to the reward part "yes". `faults` maps the name of a method to a function that runs in
    it.
    """

    name = "counting"
    system_prompt: str | None = "Be brief."
    dialogue = True
    max_turns = 3
    reward_weights: Mapping[str, float] = {"yes": 2.0, "length": 0.5}

    def __init__(self, turns: int = 2, **faults: Any) -> None:
        self.turns, self.faults = turns, faults
        self.made: list[str] = []
        self.closed: list[str] = []

    def tasks(self, split: Split) -> Iterator[Task]:
        for shade in range(6):
            yield Task(f"t{shade}", split, {"shade": shade})

    def episode(self, task: Task) -> CountingEpisode:
        self.made.append(task.task_id)
        return CountingEpisode(self, task)

    def close(self) -> None:
        pass


class CountingEpisode:
    def __init__(self, environment: Counting, task: Task) -> None:
        self.environment, self.task, self.turn = environment, task, 0

    async def fault(self, place: str) -> Any:
        happens = self.environment.faults.get(place)
        return await happens(self) if happens else None

    async def reset(self) -> Observation:
        shown = await self.fault("reset")
        image = EncodedImage(png(self.task.payload["shade"]), "image/png")
        return shown or Observation(("Look: ", image, "Yes?"), anchor_key=f"{self.task.task_id}/0")

    async def step(self, action: str) -> Outcome:
        self.turn += 1
        outcome = await self.fault("step")
        if outcome:
            return outcome
        parts = {"yes": float(action == "yes"), "length": float(len(action))}
        if self.turn == self.environment.turns:
            return Outcome(None, parts)
        later = EncodedImage(png(100 + self.turn), "image/png")
        return Outcome(
            Observation((later, f"And now? {self.turn}")), parts, action_defect=None if action == "yes" else "format"
        )

    async def close(self) -> None:
        self.environment.closed.append(self.task.task_id)
        await self.fault("close")


IMPATIENT = make_machine(environment_timeout=2.0)


async def collecting(
    environment: Environment,
    policy: ScriptedPolicy | Script,
    store: ImageStore,
    events: RecordedEvents,
    *,
    tasks: int = 6,
    group_size: int = 2,
    **options: Any,
) -> GenerateOutputs:
    pool = policy if isinstance(policy, ScriptedPolicy) else ScriptedPolicy(policy)
    chosen = list(environment.tasks("train"))[:tasks]
    options = {"step": 4, "seed": 11, "machine": Machine(), "events": events} | options
    return await collect(environment, chosen, group_size, pool, store, SAMPLING, **options)


def play(*arguments: Any, tasks: int = 2, **options: Any) -> GenerateOutputs:
    return asyncio.run(collecting(*arguments, tasks=tasks, **options))


def says(text: str) -> Script:
    return lambda messages, seed: text


def test_rollout_records_tokens_images_rewards_and_messages(store, events):
    environment = Counting()
    outputs = play(environment, says("yes"), store, events)
    assert [trajectory.trajectory_id for trajectory in outputs.trajectories] == [
        "000004-0000-00",
        "000004-0000-01",
        "000004-0001-00",
        "000004-0001-01",
    ]
    assert outputs.failures == () and sorted(environment.made) == ["t0", "t0", "t1", "t1"]
    starts = [trajectory.turns[0].messages for trajectory in outputs.trajectories]
    assert starts[0] == starts[1] != starts[2] == starts[3], "members of a group begin alike"
    one = outputs.trajectories[2]
    assert (one.group_id, one.environment, one.task_id, one.split) == ("000004-0001", "counting", "t1", "train")
    assert not one.truncated and one.reward == 2 * (2.0 + 1.5) and one.reward_parts == {"yes": 2.0, "length": 6.0}
    first, second = one.turns
    assert (first.index, second.index) == (0, 1)
    assert (first.anchor_key, second.anchor_key) == ("t1/0", None)
    assert first.completion == "yes" and first.policy_version == 3 and first.finish_reason == "stop"
    assert first.completion_token_ids.tolist() == [*b"yes", 256] and first.completion_logprobs.dtype == np.float32
    assert store.read(first.images[0]) == png(1)
    assert second.images == (*first.images, second.images[1]) and store.read(second.images[1]) == png(101)
    assert json.loads(first.messages) == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image", "sha256": first.images[0].sha256},
                {"type": "text", "text": "Yes?"},
            ],
        },
    ]
    assert [message["role"] for message in json.loads(second.messages)] == ["user"]


def test_server_gets_the_whole_chat_with_stored_image_bytes(store, events):
    policy = ScriptedPolicy(says("yes"))
    outputs = play(Counting(), policy, store, events, tasks=1, group_size=1)
    messages, _ = policy.requests[1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "yes"
    sent = [part["image_url"]["url"] for message in messages for part in message["content"] if "image_url" in part]
    head = "data:image/png;base64,"
    assert all(url.startswith(head) for url in sent)
    stored = [store.read(image) for image in outputs.trajectories[0].turns[1].images]
    assert [base64.b64decode(url.removeprefix(head)) for url in sent] == stored


def test_server_gets_a_video_as_it_is_stored(store, events):
    async def show(episode: Any) -> Observation:
        return Observation((clip(3, 0.5), "What moves?"))

    policy = ScriptedPolicy(says("yes"))
    outputs = play(Counting(turns=1, reset=show), policy, store, events, tasks=1, group_size=1)
    ((_, message), _) = policy.requests[0]
    (ref,) = outputs.trajectories[0].turns[0].images
    data = base64.b64encode(store.read(ref)).decode()
    assert message["content"][0] == {"type": "video_url", "video_url": {"url": f"data:image/apng;base64,{data}"}}
    assert store.open(ref) == decode_video(clip(3, 0.5))


def test_prompt_without_history_has_system_prompt_and_observation(store, events):
    environment = Counting()
    environment.dialogue = False
    policy = ScriptedPolicy(says("yes"))
    outputs = play(environment, policy, store, events, tasks=1, group_size=1)
    messages, _ = policy.requests[1]
    assert [message["role"] for message in messages] == ["system", "user"]
    first, second = outputs.trajectories[0].turns
    assert len(second.images) == 1 and second.images != first.images
    assert [message["role"] for message in json.loads(second.messages)] == ["user"]


def test_shared_image_is_stored_once(store, events, monkeypatch):
    puts: list[str] = []
    put = ImageStore.put
    monkeypatch.setattr(ImageStore, "put", lambda self, image: (puts.append(image.sha256), put(self, image))[1])
    play(Counting(), says("yes"), store, events, tasks=3, group_size=8)
    assert len(puts) == 4 == len(set(puts))
    assert len([path for path in store.root.rglob("*") if path.is_file()]) == 4


def test_seeds_differ_between_requests_and_repeat_between_runs(store, events):
    def seeds(**where: int) -> list[int]:
        policy = ScriptedPolicy(says("yes"))
        play(Counting(), policy, store, events, **where)
        return sorted(seed for _, seed in policy.requests)

    first = seeds()
    assert first == seeds() and len(set(first)) == 8 and all(0 <= seed < 2**63 for seed in first)
    assert not set(first) & set(seeds(step=5)) and not set(first) & set(seeds(seed=12))


def test_rollouts_keep_the_planned_order(store, events):
    quick = play(Counting(), ScriptedPolicy(says("yes")), store, events, tasks=4, group_size=4)
    slow = play(Counting(), ScriptedPolicy(says("yes"), shuffle=True), store, events, tasks=4, group_size=4)
    for one, other in zip(quick.trajectories, slow.trajectories, strict=True):
        assert one.trajectory_id == other.trajectory_id and one.task_id == other.task_id
        for turn, same in zip(one.turns, other.turns, strict=True):
            assert np.array_equal(turn.completion_logprobs, same.completion_logprobs)


def test_episode_at_the_turn_limit_is_truncated(store, events):
    outputs = play(Counting(turns=9), says("yes"), store, events)
    assert all(trajectory.truncated and len(trajectory.turns) == 3 for trajectory in outputs.trajectories)


def test_progress_shows_the_mean_reward(store, events):
    play(Counting(turns=1), says("yes"), store, events)
    assert [(name, done, total) for name, done, total, _ in events.bars] == [("rollouts", k, 4) for k in (1, 2, 3, 4)]
    assert events.bars[-1][3] == {"rew": 3.5}
    assert events.messages == []


def test_seeds_of_a_group_are_consecutive(store, events):
    policy = ScriptedPolicy(says("yes"))
    play(Counting(), policy, store, events, tasks=1, group_size=4)
    seeds = sorted(seed for _, seed in policy.requests)
    assert len(seeds) == 8
    for turn in (seeds[:4], seeds[4:]):
        assert turn == list(range(turn[0], turn[0] + 4))


def test_concurrent_episodes_are_limited(store, events):
    in_flight, most = 0, 0

    async def enter(episode: CountingEpisode) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)

    async def leave(episode: CountingEpisode) -> None:
        nonlocal in_flight
        in_flight -= 1

    machine = make_machine(max_concurrent=3)
    policy = ScriptedPolicy(says("yes"), shuffle=True)
    play(Counting(reset=enter, close=leave), policy, store, events, tasks=5, group_size=4, machine=machine)
    assert most == 3 and in_flight == 0


# --- faults -----------------------------------------------------------------------------------------------------


async def raises(episode: CountingEpisode) -> None:
    if episode.task.task_id == "t1":
        raise RuntimeError("the simulator has crashed \ud800")


async def hangs(episode: CountingEpisode) -> None:
    if episode.task.task_id == "t1":
        await asyncio.sleep(60)


def shows(*content: Any) -> Callable[[CountingEpisode], Any]:
    async def shown(episode: CountingEpisode) -> Observation | None:
        return Observation(content) if episode.task.task_id == "t1" else None

    return shown


def gives(outcome: Any) -> Callable[[CountingEpisode], Any]:
    async def given(episode: CountingEpisode) -> Any:
        return outcome if episode.task.task_id == "t1" else None

    return given


def only_the_second_group_failed(outputs: GenerateOutputs, reason: str) -> None:
    assert [failure.trajectory_id for failure in outputs.failures] == ["000004-0001-00", "000004-0001-01"]
    assert outputs.drops == {reason: 2}
    assert [trajectory.task_id for trajectory in outputs.trajectories] == ["t0", "t0", "t2", "t2"]


def test_no_request_after_the_end_of_an_episode(store, events):
    policy = ScriptedPolicy(says("yes"), shuffle=True)
    environment = Counting(turns=3, step=gives(Outcome(None, {"yes": 1.0})))
    outputs = play(environment, policy, store, events, tasks=3)
    assert [len(trajectory.turns) for trajectory in outputs.trajectories] == [3, 3, 1, 1, 3, 3]
    assert len(policy.requests) == 14


@pytest.mark.parametrize("place", ["reset", "step", "close"])
def test_raising_environment_fails_only_its_episodes(place, store, events):
    environment = Counting(**{place: raises})
    outputs = play(environment, says("yes"), store, events, tasks=3)
    only_the_second_group_failed(outputs, "environment_error")
    assert f"{place}: RuntimeError: the simulator has crashed ?" in outputs.failures[0].detail
    assert sorted(environment.closed) == ["t0", "t0", "t1", "t1", "t2", "t2"]
    assert "2 of 6 rollouts failed" in events.messages[0] and "2 environment_error" in events.messages[0]
    assert events.bars[-1][3]["failed"] == 2


@pytest.mark.parametrize("place", ["reset", "step", "close"])
def test_hanging_environment_times_out(place, store, events):
    outputs = play(Counting(**{place: hangs}), says("yes"), store, events, tasks=3, machine=IMPATIENT)
    only_the_second_group_failed(outputs, "environment_timeout")


def bomb() -> bytes:
    """Return a small PNG file whose header says that it has 60000 x 60000 pixels."""
    header = b"IHDR" + (60000).to_bytes(4) * 2 + b"\x08\x02\0\0\0"
    return png(1)[:8] + (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4) + png(1)[33:]


@pytest.mark.parametrize(
    ("image", "output"),
    [
        pytest.param(EncodedImage(png(1)[:40], "image/png"), "", id="truncated"),
        pytest.param(EncodedImage(b"not an image", "image/png"), "", id="not an image"),
        pytest.param(EncodedImage(b"", "image/png"), "", id="empty"),
        pytest.param(EncodedImage(bomb(), "image/png"), "decompression bomb", id="decompression bomb"),
        pytest.param(EncodedImage(png(1, format="JPEG"), "image/png"), "JPEG", id="jpeg that says png"),
        pytest.param(EncodedImage(png(1), "image/svg+xml"), "svg", id="another media type"),
        pytest.param(EncodedImage(b"../../etc/passwd", "image/png"), "", id="a path"),
        *(pytest.param(image, "", id=name) for name, (image, _) in refused_images().items()),
    ],
)
def test_untrusted_image_fails_only_its_episodes(image, output, store, events):
    outputs = play(Counting(reset=shows(image)), says("yes"), store, events, tasks=3)
    only_the_second_group_failed(outputs, "bad_image")
    assert output in outputs.failures[0].detail


@pytest.mark.parametrize("image", [turned_images()["JPEG RGB EXIF 6"], other_images()["WEBP RGBA"]])
def test_server_gets_the_stored_image(image, store, events):
    policy = ScriptedPolicy(says("yes"))
    outputs = play(Counting(reset=shows("Look.", image)), policy, store, events, tasks=2)
    turn = outputs.trajectories[2].turns[0]
    (ref,) = turn.images
    sent = {part["image_url"]["url"] for messages, _ in policy.requests for part in messages[1]["content"][1:2]}
    assert f"data:{ref.media_type};base64,{base64.b64encode(store.read(ref)).decode()}" in sent
    with Image.open(store.path(ref)) as saved:
        assert (saved.mode, saved.size) == ("RGB", (ref.width, ref.height))
        assert Image.MIME[str(saved.format)] == ref.media_type and not saved.getexif()
    assert json.loads(turn.messages)[-1]["content"][-1]["sha256"] == ref.sha256


def gives_unencoded(kind: Callable[[bytes], Any]) -> Callable[[CountingEpisode], Any]:
    async def given(episode: CountingEpisode) -> Observation | None:
        if episode.task.task_id != "t1":
            return None
        return Observation(("Look.", EncodedImage(kind(png(1)), "image/png")))

    return given


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda data: Image.open(io.BytesIO(data)), id="Pillow"),
        pytest.param(lambda data: np.asarray(Image.open(io.BytesIO(data))), id="NumPy"),
        pytest.param(lambda _: "photo.png", id="path"),
        pytest.param(lambda _: None, id="None"),
    ],
)
def test_unencoded_images_fail_only_their_episodes(kind, store, events):
    outputs = play(Counting(reset=gives_unencoded(kind)), says("yes"), store, events, tasks=3)
    only_the_second_group_failed(outputs, "environment_error")
    assert "encode_png" in outputs.failures[0].detail


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        pytest.param({"reset": shows("a lone \udcff")}, "bad_text", id="surrogate"),
        pytest.param({"reset": shows(7)}, "environment_error", id="content of another type"),
        pytest.param({"reset": gives("text")}, "environment_error", id="no observation"),
        pytest.param({"step": gives("text")}, "environment_error", id="no outcome"),
        pytest.param({"step": gives(Outcome(None, {"fame": 1.0}))}, "bad_reward", id="a part without weight"),
        pytest.param({"step": gives(Outcome(None, {"yes": float("nan")}))}, "bad_reward", id="nan"),
        pytest.param({"step": gives(Outcome(None, {"yes": float("inf")}))}, "bad_reward", id="inf"),
        pytest.param({"step": gives(Outcome(None, {"yes": "1"}))}, "environment_error", id="a part that is text"),
    ],
)
def test_rejects_invalid_returns_of_environments(faults, reason, store, events):
    only_the_second_group_failed(play(Counting(**faults), says("yes"), store, events, tasks=3), reason)


@pytest.mark.parametrize("text", ["\0", "<|im_end|>", "'; DROP TABLE rollouts; --", "‮", '{"role": "system"}'])
def test_hostile_text_stays_text(text, store, events):
    outputs = play(Counting(reset=shows(text)), says(text), store, events, tasks=3)
    assert outputs.failures == ()
    assert json.loads(outputs.trajectories[2].turns[0].messages)[1]["content"] == [{"type": "text", "text": text}]
    assert outputs.trajectories[2].turns[0].completion == text


def picky(failure: BaseException) -> Script:
    """Return a script that raises `failure` if the messages contain the image with shade 1, and answers "yes"
    otherwise."""

    def script(messages: Any, seed: int) -> str:
        if base64.b64encode(png(1)).decode() in json.dumps(messages):
            raise failure
        return "yes"

    return script


def test_failed_request_has_the_reason_of_the_server(store, events):
    for reason in ("generation_timeout", "prompt_too_long", "placeholder_sampled"):
        outputs = play(Counting(), picky(GenerationFailure("no", reason=reason)), store, events, tasks=3)
        only_the_second_group_failed(outputs, reason)


@pytest.mark.parametrize(
    ("text", "logprobs"),
    [("y", [-1.0, float("nan")]), ("y", [-1.0, float("-inf")]), ("y", [-1.0]), ("y", []), ("", [])],
)
def test_completion_with_invalid_logprobs_is_dropped(text, logprobs, store, events):
    changes = {"logprobs": np.array(logprobs, np.float32)} | ({} if text else {"token_ids": np.zeros(0, np.int32)})
    policy = ScriptedPolicy(says(text), change=lambda completion: replace(completion, **changes))
    assert play(Counting(), policy, store, events).drops == {"bad_logprobs": 4}


@pytest.mark.parametrize("error", [ServerError("every server is dead"), TypeError("a bug of ours")])
def test_errors_of_all_rollouts_end_the_call(error, store, events):
    environment = Counting()
    with pytest.raises(type(error)) as caught:
        play(environment, picky(error), store, events)
    assert caught.value is error
    assert environment.made and sorted(environment.closed) == sorted(environment.made)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("method", ["write_bytes", "rename", "mkdir"])
@pytest.mark.parametrize("after", [0, 3])
def test_full_disk_ends_the_call_and_the_next_call_completes(store, events, monkeypatch, code, method, after):
    works, left = getattr(Path, method), [after]

    def full(self: Path, *arguments: Any, **options: Any) -> Any:
        if store.root not in self.parents and self != store.root:
            return works(self, *arguments, **options)
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, "the disk is full", str(self))
        return works(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, method, full)
        with pytest.raises(StoreError) as raised:
            play(Counting(), says("yes"), store, events, tasks=6)
    assert raised.value.where == str(store.root)
    assert not list(store.root.glob("unfinished/*"))
    outputs = play(Counting(), says("yes"), store, events, tasks=6)
    assert len(outputs.trajectories) == 12 and not outputs.failures
    for turn in (turn for trajectory in outputs.trajectories for turn in trajectory.turns):
        assert all(store.read(ref) for ref in turn.images)


async def test_cancelling_closes_every_episode(store, events):
    environment = Counting()

    class Never(ScriptedPolicy):
        async def complete(self, *arguments: Any) -> Any:
            await asyncio.sleep(60)

    tasks = list(environment.tasks("train"))
    running = asyncio.create_task(
        collect(
            environment, tasks, 2, Never(says("")), store, SAMPLING, step=0, seed=0, machine=Machine(), events=events
        )
    )
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(environment.closed) == 12


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_raises_the_open_file_limit_for_episodes(few_files, store, events):
    policy = ScriptedPolicy(says("yes"), shuffle=True)
    machine = make_machine(max_concurrent=200, environment_timeout=30.0)
    outputs = play(Counting(turns=1), policy, store, events, tasks=1, group_size=200, machine=machine)
    assert len(outputs.trajectories) == 200


def test_rejects_too_low_hard_file_limit():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200));"
        "from armature.components.rollouts.collect import allow_open_files; allow_open_files(201)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "200 files, and 201 are needed" in ended.stderr


def test_sufficient_file_limit_is_unchanged(few_files):
    allow_open_files(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
