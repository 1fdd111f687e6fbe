"""Benchmarks behind vla-eval's protocol: a stand-in for `vla-eval run` in a process, and the real player."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from armature.components.artifacts.videos import pyav
from armature.components.configuration import build_recipe, load_recipe
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import Artifact, StageReport
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.opening import open_own
from armature.components.robots.evaluation.results import LiberoResult, collect_results, read_results, video_path
from armature.components.robots.evaluation.schedule import noise_seed
from armature.components.robots.evaluation.stage import play_planned, torch_threads
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.stage import POLICY_STAGE
from armature.components.robots.served.runs import BenchmarkPlayer, _Run, planned_episodes, served_robot
from armature.components.robots.served.settings import EvaluateBenchmarkStageSettings
from armature.components.robots.served.stage import EVALUATE_BENCHMARK_STAGE
from tests.builders import make_machine
from tests.refusals import refused
from tests.robots.evaluation.test_stage import Events, context
from tests.robots.policies.molmoact2 import released
from tests.robots.served.by_hand.vla_eval.cli import main as by_hand
from tests.robots.server.openpi import openpi_server

FOLDER = Path(__file__).with_name("by_hand")
CONVENTIONS = {
    "cameras": ("front",),
    "image_rotation": "upright",
    "image_channels": "rgb",
    "state_dimensions": 2,
    "state_rotation": "none",
    "length_unit": "m",
    "action_dimensions": 3,
    "action_target": "delta_end_effector",
    "action_rotation": "none",
    "action_units": "normalized",
    "gripper_open": -1.0,
    "gripper_closed": 1.0,
    "control_freq": 10,
}


def stage_settings(params: dict[str, Any] | None = None, timeout: float = 60.0, **plan: Any) -> Any:
    benchmark = {
        "name": "plane",
        "benchmark": "plane:Plane",
        "params": params or {},
        "release": "by hand",
        "python": sys.executable,
        "folder": str(FOLDER),
        "cameras": {"front": "observation.images.front"},
        "resolution": 16,
        "conventions": CONVENTIONS,
        "timeout_s": timeout,
    }
    plan = {"tasks": ("near", "far"), "episodes_per_task": 3, "max_steps": 23, "attempts": 2, **plan}
    return EvaluateBenchmarkStageSettings.model_validate({"benchmark": benchmark, "evaluation": plan})


class Push:
    """Policy that pushes the point toward the origin. The seed of a row determines the noise of the push."""

    n_action_steps, action_dimensions, rows_per_pass = 4, 3, 2

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        rows = []
        for seen, seed in zip(observations, seeds, strict=True):
            (image,) = seen.images.values()
            assert image.shape == (16, 16, 3) and abs(image[0, 0, 0] - 40 * np.linalg.norm(seen.state)) < 1.1
            noise = np.random.default_rng(seed).normal(size=(4, 3))
            rows.append(noise - np.pad(np.clip(seen.state, -1, 1), (0, 1)))
        return np.stack(rows).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        return {"policy": "push"}


def played(folder: Path, settings: Any, processes: int = 2) -> list[LiberoResult]:
    (folder / "work").mkdir(exist_ok=True, parents=True)
    planned = planned_episodes("plane", settings.evaluation)
    player = BenchmarkPlayer(settings, folder / "work/benchmark", processes)
    outcomes = play_planned(Push(), settings.evaluation, planned, player, context(folder, Events()), 3)
    return collect_results(planned, outcomes)


def expected(settings: Any) -> list[tuple[bool, list[float]]]:
    """Return success and actions of each episode, computed without the player and the stand-in's process."""
    results = []
    for planned in planned_episodes("plane", settings.evaluation):
        point, actions = by_hand.start(planned.task.name, planned.episode), []
        while len(actions) < planned.max_steps and not by_hand.solved(point):
            seen = by_hand.seen(planned.task.name, point, {})
            seed = noise_seed(settings.evaluation, planned, len(actions) // 4)
            images = {"front": seen["images"]["front"]}
            (chunk,) = Push().predict([RobotObservation(images, seen["states"].astype(np.float32), "")], [seed])
            for action in chunk[: planned.max_steps - len(actions)]:
                actions.append(action)
                point = point + 0.2 * action[:2]
                if by_hand.solved(point):
                    break
        results.append((by_hand.solved(point), np.concatenate(actions).tolist()))
    return results


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_those_of_the_same_policy_played_by_hand(tmp_path, processes):
    settings = stage_settings()
    results = played(tmp_path, settings, processes)
    solved = sum(result.success for result in results)
    assert 0 < solved < len(results) == 6
    assert [(result.success, list(result.actions)) for result in results] == expected(settings)
    assert [(result.suite, result.task, result.episode) for result in results] == [
        ("plane", task, k) for task in range(2) for k in range(3)
    ]


def test_episode_that_the_benchmark_ends_is_not_solved(tmp_path):
    results = played(tmp_path, stage_settings({"ends": 2}, tasks=("far",)))
    assert [(result.success, result.steps, result.failure) for result in results] == [(False, 2, None)] * 3


@pytest.mark.parametrize("failure", ["dies once", "raises once"])
def test_benchmark_that_fails_is_started_again_and_repeats_no_episode(tmp_path, failure):
    settings = stage_settings({"failures": {"far/1/2": failure}})
    results = played(tmp_path, settings)
    assert [(result.success, list(result.actions)) for result in results] == expected(settings)
    finished = (tmp_path / "work/benchmark/played").read_text().split()
    assert sorted(finished) == [f"{task}/{k}" for task in ("far", "near") for k in range(3)]
    assert "far/0 error" in (tmp_path / "work/benchmark/1.log").read_text()


def test_evaluation_keeps_finished_episodes_of_one_that_failed(tmp_path):
    broken = stage_settings({"failures": {"far/1/2": "dies"}})
    with refused("too_many_episodes_failed", "the simulator crashed", "far"):
        played(tmp_path, broken, 1)
    before = (tmp_path / "work/benchmark/played").read_text().split()
    assert before == ["near/0", "near/1", "near/2", "far/0"]
    results = played(tmp_path, stage_settings(), 1)
    assert (tmp_path / "work/benchmark/played").read_text().split() == [*before, "far/1", "far/2"]
    assert [(result.success, list(result.actions)) for result in results] == expected(stage_settings())


def test_episodes_that_may_fail_are_not_solved_and_the_others_are_played(tmp_path):
    settings = stage_settings({"failures": {"far/1/2": "dies"}}, failed_episodes=1)
    results = played(tmp_path, settings)
    assert [result.failure is None for result in results] == [True] * 4 + [False, True]
    assert "the simulator crashed" in str(results[4].failure)


@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({"cameras": ["side"]}, ("cameras is front", "side")),
        ({"more": 1}, ("state_dimensions is 2", 3)),
        ({"shape": [16, 20, 3]}, ("size of front is 16, 16, 3", "16, 20, 3")),
    ],
    ids=["camera", "state", "image"],
)
def test_rejects_observations_that_are_not_as_declared(tmp_path, params, values):
    with refused("conventions_disagree", *values):
        played(tmp_path, stage_settings(params, tasks=("near",)))


@pytest.mark.parametrize(
    ("params", "code", "values"),
    [
        ({"failures": {"near/0/1": "junk"}}, "message_unreadable", ("plane:Plane",)),
        ({"failures": {"near/0/1": "text"}}, "text_frame", ("plane:Plane",)),
        ({"failures": {"near/0/1": "list"}}, "message_not_a_map", ("plane:Plane",)),
        ({"failures": {"near/0/1": "nothing"}}, "benchmark_message_invalid", ()),
        ({"failures": {"near/0/2": "large"}}, "benchmark_message_invalid", (2**26,)),
        ({"result": {"reward": 1.0}}, "benchmark_message_invalid", ("success",)),
        ({"result": {"success": [True, False]}}, "benchmark_message_invalid", ("success",)),
        ({"version": 2}, "benchmark_message_invalid", ("version 2",)),
        ({"shape": [16, 16]}, "conventions_disagree", ("16, 16, 3",)),
    ],
)
def test_rejects_invalid_messages(tmp_path, params, code, values):
    with refused(code, *values):
        played(tmp_path, stage_settings(params, tasks=("near",)))


def test_benchmark_that_never_connects_is_ended(tmp_path):
    package = tmp_path / "asleep/vla_eval/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import time\ntime.sleep(600)\n")
    settings = stage_settings(None, 1.0, tasks=("near",), attempts=1)
    asleep = settings.benchmark.model_copy(update={"folder": str(tmp_path / "asleep")})
    with refused("too_many_episodes_failed", "neither connects nor ends"):
        played(tmp_path, settings.model_copy(update={"benchmark": asleep}))


def test_rejects_task_of_which_no_episode_starts(tmp_path):
    for name in ("nearer", "plane"):  # the second one is the suite, which vla-eval takes for a task
        with refused("benchmark_started_nothing", name):
            played(tmp_path, stage_settings(tasks=(name,)))
    broken = {f"near/{k}/0": "raises" for k in range(3)}
    with refused("benchmark_started_nothing", "near"):
        played(tmp_path, stage_settings({"failures": broken}, tasks=("near",)))


def test_episode_that_never_starts_is_given_up(tmp_path):
    results = played(tmp_path, stage_settings({"failures": {"near/1/0": "raises"}}, failed_episodes=1, tasks=("near",)))
    assert [result.failure is None for result in results] == [True, False, True]


def test_rejects_actions_for_another_robot(tmp_path):
    settings = stage_settings()
    planned = planned_episodes("plane", settings.evaluation)
    player = BenchmarkPlayer(settings, tmp_path / "work/benchmark", 1)
    with refused("action_shape_mismatch", "plane task 0 episode 0"):
        play_planned(Push(), settings.evaluation, planned, player, context(tmp_path, Events()), 4)


def test_only_the_runs_of_this_process_are_served_each_once_and_not_if_silent(tmp_path):
    settings = stage_settings(timeout=3.0)
    player = BenchmarkPlayer(settings, tmp_path, 1)
    player._runs["token"] = run = _Run(planned_episodes("plane", settings.evaluation)[0].task, {}, 0)
    with player._listening(lambda *_: pytest.fail("played"), lambda *_: None) as url:
        with connect(f"{url}/token") as silent:
            for path in ("guess", "token"):
                with connect(f"{url}/{path}") as connection, pytest.raises(ConnectionClosed):
                    connection.recv(5)
            assert run.ended is None
            with pytest.raises(ConnectionClosed):
                silent.recv(60)
        assert isinstance(run.ended, WorkerError) and run.ended.code == "benchmark_silent"
        with pytest.raises(InvalidStatus):
            connect(url, origin="http://127.0.0.1:8000")  # type: ignore[arg-type]
        assert url.startswith("ws://127.0.0.1:")


# --- The stage and the recipe ---


def evaluate(folder: Path, answer: Any, seed: bool = True, **conventions: Any) -> tuple[Path, Events, StageReport]:
    """Run the stage with a policy behind openpi's protocol."""
    described: dict[str, Any] = {name: {} for name in ("front", "state", "prompt")}
    described |= {"seed": {"optional": True}} if seed else {}
    settings, events = stage_settings(n_action_steps=4), Events()
    with openpi_server(answer, {"observation": described}) as (url, _):
        server = {"url": url, "weights": "push", "camera_fields": ["front"], "state_field": "state"}
        policy = RobotPolicySettings.model_validate({"server": {**server, "conventions": CONVENTIONS | conventions}})
        for name in ("policy", "out"):
            (folder / name).mkdir()
        POLICY_STAGE.run(policy, {}, folder / "policy", context(folder, events))
        inputs = {"policy": Artifact(kind="policy", path=folder / "policy", digest="d")}
        report = EVALUATE_BENCHMARK_STAGE.run(settings, inputs, folder / "out", context(folder, events))
    return folder / "out", events, report


def answer(request: dict[str, Any]) -> Any:
    assert request["prompt"].startswith("go from")
    seen = RobotObservation({"front": request["front"]}, request["state"], "")
    return Push().predict([seen], [request.get("seed", 0)])[0]


def test_stage_writes_results_metrics_and_report(tmp_path):
    out, events, report = evaluate(tmp_path, answer)
    results = read_results(out)
    assert [(result.success, list(result.actions)) for result in results] == expected(stage_settings())
    numbers = json.loads((out / "metrics.json").read_text())
    assert numbers["success"] == sum(result.success for result in results) / 6 == events.numbers["success"]
    assert list(numbers["tasks"]) == ["plane/0", "plane/1"]
    filmed = {path.relative_to(out).as_posix() for path in out.glob("videos/*/*.mp4")}
    kinds = [(result.task, result.success) for result in results]
    assert filmed == {video_path(each.key) for i, each in enumerate(results) if kinds[:i].count(kinds[i]) < 2}
    assert report.rows == {"episodes": 6, "videos": len(filmed)} and report.drops == {}
    assert "Evaluation: plane" in (out / "report.html").read_text()


def test_videos_show_the_first_successes_and_failures_also_after_a_lost_run(tmp_path):
    failures = {"near/1/2": "dies once", "far/0/1": "dies once"}
    settings = stage_settings({"failures": failures}, episodes_per_task=5, videos_per_task=1)
    (tmp_path / "work").mkdir()
    planned = planned_episodes("plane", settings.evaluation)
    player = BenchmarkPlayer(settings, tmp_path / "work/benchmark", 2)
    outcomes = play_planned(Push(), settings.evaluation, planned, player, context(tmp_path, Events()), 3)
    results = collect_results(planned, outcomes)
    stills = player.films.collect(planned, outcomes, results, tmp_path / "out")
    first = {(result.suite, result.task, result.success): result for result in reversed(results)}
    assert {still.key for still in stills} == {result.key for result in first.values()}
    for result in first.values():
        with pyav().open(str(tmp_path / "out" / video_path(result.key))) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert len(frames) == result.steps
        start = by_hand.start(("near", "far")[result.task], result.episode)
        assert abs(frames[0].mean() - 40 * np.linalg.norm(start)) < 3


def test_server_that_draws_its_own_noise_is_named(tmp_path):
    _, events, _ = evaluate(tmp_path, answer, seed=False)
    assert any("draws its own noise" in line for line in events.lines)


def test_stage_refuses_a_policy_with_other_conventions(tmp_path):
    with refused("conventions_disagree", "gripper_open is 1 in policy.server.conventions, -1 in the simulator"):
        evaluate(tmp_path, answer, gripper_open=1.0)


@pytest.mark.parametrize(
    ("section", "changes", "code", "values"),
    [
        ("policy", {"lerobot": {"conventions": {"control_freq": 20}}}, "conventions_disagree", ("control_freq", 80)),
        ("benchmark", {"conventions": {"gripper_closed": 0.5}}, "conventions_disagree", ("gripper_closed", 0.5)),
        ("benchmark", {"python": "nowhere/python"}, "benchmark_python_missing", ("nowhere/python",)),
        ("benchmark", {"python": str(FOLDER)}, "benchmark_python_missing", (str(FOLDER),)),
        ("benchmark", {"folder": "nowhere"}, "benchmark_folder_missing", ("nowhere", "metaworld_benchmark:MetaWorld")),
    ],
)
def test_recipe_is_refused_before_anything_is_computed(section, changes, code, values):
    recipe = load_recipe("evaluate/metaworld").values.model_dump(mode="json", exclude_none=True)
    recipe["benchmark"]["python"] = sys.executable
    build = build_recipe("evaluate/metaworld", merged(recipe, {section: changes}), where="here")
    with refused(code, *values):
        build.values.refuse_ahead()


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    deeper = {key: merged(values[key], each) for key, each in changes.items() if isinstance(each, dict)}
    return {**values, **changes, **deeper}


@pytest.mark.parametrize(
    ("section", "changes", "code", "shown"),
    [
        ("benchmark", {"benchmark": "metaworld"}, "string_pattern_mismatch", "benchmark"),
        ("benchmark", {"cameras": {"side": "observation.image"}}, "value_error", "corner2"),
        ("evaluation", {"tasks": ["reach-v3", "reach-v3"]}, "value_error", "reach-v3"),
        ("evaluation", {"tasks": []}, "too_short", "tasks"),
        ("evaluation", {"suites": ["libero_10"]}, "extra_forbidden", "suites"),
    ],
)
def test_rejects_invalid_settings(section, changes, code, shown):
    recipe = load_recipe("evaluate/metaworld").values.model_dump(mode="json", exclude_none=True)
    with refused(code, shown):
        build_recipe("evaluate/metaworld", {**recipe, section: recipe[section] | changes}, where="here")


@pytest.fixture(scope="module")
def own_policy(tmp_path_factory) -> Artifact:
    """A small policy of ours with random weights: two cameras, states of 8 and actions of 7 dimensions."""
    folder = tmp_path_factory.mktemp("own")
    checkpoint = str(released.write_released(folder / "released"))
    settings = released.KITCHEN.model_copy(update={"checkpoint_path": checkpoint, "num_inference_steps": 2})
    (folder / "policy").mkdir()
    POLICY_STAGE.run(settings, {}, folder / "policy", context(folder, Events()))
    return Artifact(kind="policy", path=folder / "policy", digest="d")


def for_own(actions: int = 7) -> Any:
    params = {"cameras": ["wrist", "front"], "more": 6}  # not in alphabetical order
    plan = {"tasks": ("near",), "episodes_per_task": 2, "max_steps": 4, "n_action_steps": 3}
    settings = stage_settings(params, **plan).model_dump(mode="json")
    settings["benchmark"]["cameras"] = {name: f"observation.images.{name}" for name in params["cameras"]}
    sizes = {"cameras": params["cameras"], "state_dimensions": 8, "action_dimensions": actions}
    settings["benchmark"]["conventions"] |= sizes
    return EvaluateBenchmarkStageSettings.model_validate(settings)


def test_policy_of_our_own_plays_a_benchmark(own_policy, tmp_path):
    settings = for_own()
    (tmp_path / "out").mkdir()
    EVALUATE_BENCHMARK_STAGE.run(
        settings, {"policy": own_policy}, tmp_path / "out", context(tmp_path, Events(), threads=1)
    )
    results = read_results(tmp_path / "out")
    with torch_threads(make_machine(threads=1)):
        policy = open_own(own_policy.path, served_robot(settings.benchmark), settings.evaluation)
        planned_and_results = zip(planned_episodes("plane", settings.evaluation), results, strict=True)
        for planned, result in planned_and_results:
            seen = by_hand.seen("near", by_hand.start("near", planned.episode), settings.benchmark.params)
            images = {f"observation.images.{name}": image for name, image in seen["images"].items()}
            observation = RobotObservation(images, seen["states"].astype(np.float32), seen["task_description"])
            (chunk,) = policy.predict([policy.prepared(observation)], [noise_seed(settings.evaluation, planned, 0)])
            assert result.steps == 4 and list(result.actions[:21]) == chunk.reshape(-1).tolist()


def test_policy_with_other_cameras_is_refused(own_policy):
    robot = replace(served_robot(for_own().benchmark), cameras={"top": "observation.images.top"})
    with refused("simulator_camera_missing", "observation.images.top", "benchmark.cameras"):
        open_own(own_policy.path, robot, for_own().evaluation)


def test_policy_of_another_robot_is_refused(own_policy, tmp_path):
    with refused("conventions_disagree", "action_dimensions is 7 in the policy, 4 in the simulator"):
        EVALUATE_BENCHMARK_STAGE.run(for_own(4), {"policy": own_policy}, tmp_path, context(tmp_path, Events()))


def test_policy_with_other_states_is_refused(own_policy):
    robot = served_robot(for_own().benchmark)
    robot = replace(robot, conventions=robot.conventions.model_copy(update={"state_dimensions": 6}))
    with refused("conventions_disagree", "state_dimensions is 8 in the policy, 6 in the simulator"):
        open_own(own_policy.path, robot, for_own().evaluation)


def test_module_of_the_benchmark_is_part_of_the_fingerprint(tmp_path):
    settings = stage_settings()
    here = settings.benchmark.model_copy(update={"folder": str(tmp_path)})
    settings, seen = settings.model_copy(update={"benchmark": here}), []
    (tmp_path / "plane").mkdir()
    for file, text in [
        ("plane/__init__.py", "from plane_parts import Plane\n"),
        ("plane_parts.py", "class Plane: ...\n"),
        ("plane_parts.py", "class Plane: pass\n"),
        ("plane/more.py", ""),
    ]:
        (tmp_path / file).write_text(text)
        seen.append(EVALUATE_BENCHMARK_STAGE.sources(settings, {})["benchmark"])
    (tmp_path / "other.py").write_text("")
    assert len({*seen}) == 4 and EVALUATE_BENCHMARK_STAGE.sources(settings, {})["benchmark"] == seen[-1]
