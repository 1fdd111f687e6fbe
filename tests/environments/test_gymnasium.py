"""The environment `gymnasium` against environments that are played directly, and with ones that misbehave."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import minigrid  # noqa: F401 (it registers its environments)
import numpy as np
import pytest
from minigrid.utils.baby_ai_bot import BabyAIBot
from PIL import Image
from pydantic import ValidationError

from armature.components.configuration import load_recipe
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.environments.guarded import GuardedEpisode
from armature.components.environments.gymnasium.game import GymnasiumGame, make_env
from armature.components.environments.gymnasium.settings import GymnasiumSettings
from armature.components.environments.gymnasium.worker import GymnasiumHandler
from armature.components.environments.make import environment_sources, make_environment, refuse_ahead
from armature.components.environments.settings import EnvironmentSettings
from armature.components.machine.workers.channel import WorkerError
from armature.components.vlm.sft.demonstrate import expert
from tests.refusals import refused

from .gym_games import NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs/gymnasium.md"
MOVES = ["left", "down", "right", "up"]
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "actions": MOVES, "max_turns": 6, "make": {"is_slippery": False}}
RANDOM_LAKE: dict[str, Any] = LAKE | {
    "make": {
        "is_slippery": False,
        "desc": {
            "call": "gymnasium.envs.toy_text.frozen_lake:generate_random_map",
            "args": {"size": 4, "seed": "{seed}"},
        },
    }
}
BABY: dict[str, Any] = {
    "id": "BabyAI-GoToObj-v0",
    "modules": ["minigrid"],
    "actions": ["turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done"],
    "prompt": "{image}{mission}, direction {obs.direction}",
    "max_turns": 20,
}
LINE: dict[str, Any] = {
    "id": "tests/Line-v0",
    "modules": ["tests.environments.gym_games"],
    "actions": list(NAMES),
    "image": "none",
    "prompt": "{obs} to {info.goal}",
    "max_turns": 12,
}


def settings_of(args: dict[str, Any], **changes: Any) -> EnvironmentSettings:
    return EnvironmentSettings(name="gymnasium", args=args | changes, train_tasks=8, heldout_tasks=8)


def play(args: dict[str, Any], answers: Sequence[str], **changes: Any) -> tuple[Task, list[Observation], list[Outcome]]:
    """Play the first training task and return it, its observations and its outcomes."""

    async def episode() -> tuple[Task, list[Observation], list[Outcome]]:
        with closing(make_environment(settings_of(args, **changes))) as environment:
            task = next(iter(environment.tasks("train")))
            playing = environment.episode(task)
            observations, outcomes = [await playing.reset()], []
            for answer in answers:
                outcomes.append(await playing.step(answer))
                if (shown := outcomes[-1].observation) is None:
                    break
                observations.append(shown)
            await playing.close()
            return task, observations, outcomes

    return asyncio.run(episode())


def pixels(part: Any) -> Any:
    assert isinstance(part, EncodedImage)
    return np.asarray(Image.open(io.BytesIO(part.data)))


@pytest.mark.parametrize(
    ("args", "actions"),
    [
        pytest.param(RANDOM_LAKE, [2, 1, 0, 1, 3], id="FrozenLake"),
        pytest.param(LAKE | {"make": {"is_slippery": True}}, [1, 1, 2, 1], id="slippery FrozenLake"),
        pytest.param(BABY, [2, 0, 2, 1, 1, 2, 2, 3, 6], id="BabyAI"),
    ],
)
def test_frames_and_rewards_are_the_environments_own(args: dict[str, Any], actions: list[int]) -> None:
    task, observations, outcomes = play(args, [args["actions"][action].upper() for action in actions])
    env = gymnasium.make(args["id"], render_mode="rgb_array", **task.payload["make"])
    observation, _ = env.reset(seed=task.payload["seed"])
    np.testing.assert_array_equal(pixels(observations[0].content[0]), env.render())  # type: ignore[arg-type]
    for action, outcome in zip(actions, outcomes, strict=True):
        observation, reward, terminated, truncated, _ = env.step(action)
        assert outcome.reward_parts["reward"] == reward and outcome.action_defect is None
        assert outcome.done == (terminated or truncated)
        if outcome.observation is None:
            return
        np.testing.assert_array_equal(pixels(outcome.observation.content[0]), env.render())  # type: ignore[arg-type]
        if args is BABY:
            text = "".join(part for part in outcome.observation.content if isinstance(part, str))
            assert text == f"{observation['mission']}, direction {observation['direction']}"


def test_heldout_maps_are_not_training_maps() -> None:
    many = EnvironmentSettings(name="gymnasium", args=RANDOM_LAKE, train_tasks=2000, heldout_tasks=500)
    environment = make_environment(many)
    train, heldout = (
        {json.dumps(task.payload["make"]["desc"]) for task in environment.tasks(split)}
        for split in ("train", "heldout")
    )
    assert len(train) > 300 and len(heldout) > 150 and not train & heldout
    seeds = [task.payload["seed"] for split in ("train", "heldout") for task in environment.tasks(split)]  # type: ignore[arg-type]
    assert len(set(seeds)) == 2500


def test_equal_states_have_equal_anchors() -> None:
    moves = ["right", "left", "left", "down"]
    for changes in ({}, {"image": "none", "prompt": "Go.", "anchor": "observation"}):
        keys = [each.anchor_key for each in play(LAKE, moves, **changes)[1]]
        assert keys[0] == keys[2] == keys[3] and len(set(keys)) == 3
    assert len({each.anchor_key for each in play(LAKE, moves, image="none", prompt="Go.")[1]}) == 1


def test_invalid_answers_cost_a_turn_and_play_nothing() -> None:
    _, observations, outcomes = play(LAKE, ["north", "", "left, up", "\ud800", "right", "down"])
    assert [outcome.action_defect for outcome in outcomes] == ["format"] * 4 + [None] * 2
    assert observations[0] == observations[1] == observations[4] != observations[5]
    assert outcomes[-1].done and outcomes[-1].reward_parts == {"reward": 0.0, "success": 0.0}  # it fell in a hole


def test_several_actions_a_turn() -> None:
    solution = "down, down; Right\nright, down, right"
    _, _, outcomes = play(LAKE, [solution], actions_per_turn=6)
    assert outcomes[0].reward_parts == {"reward": 1.0, "success": 1.0} and outcomes[0].done
    _, observations, outcomes = play(LAKE, [solution, "down, north", "right, down, up"], actions_per_turn=5)
    assert [outcome.action_defect for outcome in outcomes] == ["format", "format", None]
    assert observations[0] == observations[2] and outcomes[2].done  # it fell in a hole and stayed there


def line(at: int, goal: int, **changes: Any) -> tuple[GymnasiumGame, Any]:
    """Return a game of the line that begins at `at`, and its first turn."""
    settings = GymnasiumSettings.model_validate(LINE | changes)
    GymnasiumHandler(settings.model_dump(mode="json"))
    for seed in range(10_000):
        game = GymnasiumGame(make_env(settings, settings.make), settings)
        if (turn := game.reset(seed)).content == (f"[{at}]", " to ", str(goal)):
            return game, turn
    raise AssertionError


def test_masked_actions_are_inadmissible() -> None:
    game, turn = line(1, 5, actions_per_turn=3)
    assert turn.admissible == NAMES
    turn = game.step("less, less, more")
    assert turn.defect == "inadmissible" and turn.content[0] == "[0]" and turn.admissible == NAMES[1:]


@pytest.mark.parametrize(
    ("rule", "ends", "success"),
    [("reward > 0", True, True), ("reward >= 2", True, False), ("terminated", True, True), ("info.solved", True, True)],
)
def test_success_rules(rule: str, ends: bool, success: bool) -> None:
    game, _ = line(2, 3, success=rule)
    turn = game.step("more")
    assert turn.ended and turn.success == success and turn.reward == 1


def test_actions_that_are_texts() -> None:
    echo = {"id": "tests/Echo-v0", "modules": LINE["modules"], "image": "none", "prompt": "{obs}", "max_turns": 3}
    _, observations, outcomes = play(echo, ["QQQ", "bad word"])
    assert [outcome.action_defect for outcome in outcomes] == ["format", "format"]
    (word,) = observations[0].content
    assert isinstance(word, str) and observations[0].admissible_actions is None
    assert play(echo, [word])[2][0].reward_parts == {"reward": 1.0, "success": 1.0}


def test_image_of_an_observation_and_wrapper_with_arguments() -> None:
    wrapper = {"call": "minigrid.wrappers:RGBImgObsWrapper", "args": {"tile_size": 4}}
    _, observations, _ = play(BABY, [], image="obs.image", wrappers=[wrapper])
    assert pixels(observations[0].content[0]).shape == (32, 32, 3)
    _, observations, _ = play(BABY, [], image_size=16)
    assert pixels(observations[0].content[0]).shape == (16, 16, 3)


@pytest.mark.parametrize("bad", ["crash", "hang", "raise", "nan"])
def test_bad_environment_loses_its_own_rollout_alone(bad: str) -> None:
    environment = make_environment(settings_of(LINE, call_timeout=1.0), processes=1)
    tasks = list(environment.tasks("train"))

    async def both() -> tuple[RolloutFailed, list[Any]]:
        good = GuardedEpisode(environment, tasks[0], timeout=60.0)
        shown = [(await good.reset()).content]
        faulty = GuardedEpisode(environment, tasks[1], timeout=60.0)
        await faulty.reset()
        shown += [(await good.step(answer)).observation for answer in ("more", "more")]  # type: ignore[misc]
        with pytest.raises(RolloutFailed) as failed:
            await faulty.step(bad)
        shown.append((await good.step("more")).observation)  # type: ignore[arg-type]
        for episode in (good, faulty):
            await episode.close()
        return failed.value, shown

    failure, shown = asyncio.run(both())
    assert failure.reason == "environment_error"
    alone = play(LINE, ["more"] * 3)[1]
    assert shown == [alone[0].content, *alone[1:]]


def bot(env: Any) -> Iterator[int]:
    """Yield the actions of BabyAI's own bot."""
    planner, action = BabyAIBot(env.unwrapped), None
    while True:
        action = planner.replan(action)
        yield int(action)


def walker(env: Any) -> Iterator[int]:
    """Yield the actions that lead to the goal, and one that is not possible where the line begins at its goal."""
    line = env.unwrapped
    while line._at != line._goal:
        yield 2 + (line._at < line._goal)


def lost(env: Any) -> Iterator[int]:
    """Yield a number that is no action."""
    yield 0


def broken(env: Any) -> Iterator[int]:
    """Raise an error in place of an action."""
    yield from map({}.__getitem__, [0])


def fraction(env: Any) -> Iterator[float]:
    """Yield a number near an action."""
    yield 2.7


def written(env: Any) -> Iterator[str]:
    """Yield an action as text."""
    yield "2"


def test_expert_writes_its_actions_as_they_are_extracted() -> None:
    args = LINE | {"expert": f"{__name__}:walker", "extract": "<action>"}
    with closing(make_environment(settings_of(args))) as environment:
        answers = next(filter(None, map(expert(environment).demonstration, environment.tasks("train"))))
    assert {*answers} <= {"<action>more</action>", "<action>less</action>"}


def test_expert_plays_to_the_goal() -> None:
    with closing(make_environment(settings_of(LINE, expert=f"{__name__}:walker"))) as environment:
        solved = 0
        for task in environment.tasks("train"):
            answers = expert(environment).demonstration(task)
            at, goal = np.random.default_rng(task.payload["seed"]).integers(10, size=2).tolist()
            assert answers == ["more" if goal > at else "less"] * abs(goal - at)
            solved += bool(answers)
    assert solved


def test_babyai_bot_is_an_expert() -> None:
    args = BABY | {"expert": f"{__name__}:bot"}
    with closing(make_environment(settings_of(args))) as environment:
        task = next(iter(environment.tasks("train")))
        answers = expert(environment).demonstration(task)
    assert play(args, answers)[2][-1].reward_parts["success"] == 1.0


@pytest.mark.parametrize("bad", ["lost", "broken", "fraction", "written"])
def test_bad_expert_loses_its_task_alone(bad: str) -> None:
    with closing(make_environment(settings_of(LINE, expert=f"{__name__}:{bad}"))) as environment:
        for task in environment.tasks("heldout"):
            with refused("environment_failed", "tests/Line-v0", kind=WorkerError):
                expert(environment).demonstration(task)


def test_without_an_expert_there_is_no_demonstration() -> None:
    with closing(make_environment(settings_of(LINE))) as environment, refused("demonstrator_missing", "gymnasium"):
        expert(environment)


def quiet(env: Any) -> Any:
    """Return a line whose actions do not misbehave."""
    return gymnasium.wrappers.TransformAction(env, lambda action: 2 + action % 2, env.action_space)


def raising(env: Any) -> Any:
    """Return a line whose actions all raise."""
    return gymnasium.wrappers.TransformAction(env, lambda action: 2 + NAMES.index("raise"), env.action_space)


@pytest.mark.parametrize(
    ("args", "changes", "code"),
    [
        pytest.param(LAKE, {"id": "Pendulum-v1", "make": {}}, "action_space_refused", id="continuous"),
        pytest.param(LINE | {"id": "tests/Two-v0"}, {}, "action_space_refused", id="MultiDiscrete"),
        pytest.param(LAKE, {"actions": ["left", "right"]}, "action_names_mismatch", id="too few names"),
        pytest.param(LAKE, {"actions": []}, "action_names_mismatch", id="no names"),
        pytest.param(LAKE, {"id": "FrozenLaek-v1"}, "gymnasium_make_failed", id="unknown id"),
        pytest.param(LAKE, {"make": {"deep": True}}, "gymnasium_make_failed", id="unknown argument"),
        pytest.param(LAKE, {"wrappers": ["minigrid.wrappers:Nothing"]}, "name_not_in_module", id="unknown wrapper"),
        pytest.param(LAKE, {"expert": f"{__name__}:nobody"}, "name_not_in_module", id="unknown expert"),
        pytest.param(BABY, {"modules": ["no_such_grid"]}, "environment_module_failed", id="unknown module"),
        pytest.param(LAKE, {}, "seed_without_effect", id="one map"),
        pytest.param(
            LINE,
            {"make": {"chance": "clock"}, "wrappers": [f"{__name__}:quiet"]},
            "environment_not_repeatable",
            id="clock",
        ),
        pytest.param(BABY, {"prompt": "{image}{goal}"}, "environment_failed", id="unknown field"),
        pytest.param(LAKE, {"image": "obs"}, "environment_failed", id="not an image"),
        pytest.param(LINE, {"wrappers": [f"{__name__}:raising"]}, "environment_failed", id="raises"),
    ],
)
def test_refusals(args: dict[str, Any], changes: dict[str, Any], code: str) -> None:
    environment = make_environment(settings_of(args, **changes))
    tasks = [next(iter(environment.tasks(split))).payload for split in ("train", "heldout")]  # type: ignore[arg-type]
    with refused(code, ""):
        GymnasiumHandler(settings_of(args, **changes).args).probe([(each["seed"], each["make"]) for each in tasks])


def test_global_random_numbers_repeat() -> None:
    make, wrappers = {"chance": "global", "ends": False}, [f"{__name__}:quiet"]
    refuse_ahead(settings_of(LINE, make=make, wrappers=wrappers), "", 0, 0)


def test_preflight_refuses_in_a_process() -> None:
    with refused("seed_without_effect", "FrozenLake-v1"):
        refuse_ahead(settings_of(LAKE), "", 16, 0)
    with refused("environment_not_played", "goal"):
        refuse_ahead(settings_of(BABY, dialogue=False, prompt="{image}{goal}"), "", 16, 0)
    with refused("too_many_images", "20"):
        refuse_ahead(settings_of(BABY), "", 16, 0)
    refuse_ahead(settings_of(BABY, dialogue=False), "", 16, 0)


def test_few_maps_are_refused() -> None:
    call = {"call": "builtins:dict", "args": {"size": 4}}
    with refused("arguments_alike", "FrozenLake-v1"):
        for split in ("train", "heldout"):
            list(make_environment(settings_of(LAKE, make={"desc": call})).tasks(split))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [{"call": "json:loads", "args": {"s": "{"}}, {"call": "json:loads"}, {"call": "numpy:ones", "args": {"shape": 3}}],
)
def test_function_in_make_that_fails_or_returns_no_json(call: dict[str, Any]) -> None:
    with refused("make_call_failed", call["call"]):
        list(make_environment(settings_of(LAKE, make={"desc": call})).tasks("train"))


class Unclosable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises when it is closed."""

    def close(self) -> None:
        raise OSError("no display")


def test_error_in_close_costs_the_next_game_nothing() -> None:
    handler = GymnasiumHandler(LINE | {"wrappers": [f"{__name__}:Unclosable"]})
    handler.play(0, 0, {}, [])
    handler.end(0)
    assert handler.play(1, 0, {"ends": False}, [])["content"]


class NumpyBools(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose first action ends the game, with booleans of numpy."""

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, np.True_, np.True_, info


def test_booleans_of_numpy_end_a_game() -> None:
    outcome = play(LINE, ["more"], wrappers=[f"{__name__}:NumpyBools"], success="terminated")[2][0]
    assert outcome.observation is None and outcome.reward_parts["success"] == 1.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"success": "info.won"}, "info.won"), ({"image": "obs.camera", "prompt": "{image}"}, "obs.camera")],
)
def test_missing_entries_are_named(changes: dict[str, Any], name: str) -> None:
    with refused("environment_failed", name, "obs, info", kind=WorkerError):
        play(LINE, ["more"], wrappers=[f"{__name__}:NumpyBools"], **changes)


class ShortMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose mask leaves out actions."""

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return observation, info | {"action_mask": np.ones(2)}


def test_mask_of_another_length_is_an_error() -> None:
    with refused("environment_failed", "(2,)", kind=WorkerError):
        play(LINE, [], wrappers=[f"{__name__}:ShortMask"])


def numpy_numbers(env: Any) -> Any:
    """Return a line whose observation has entries that are numbers of numpy."""
    return gymnasium.wrappers.TransformObservation(
        env, lambda at: {"at": at[0], "half": np.float32(0.5)}, env.observation_space
    )


def test_numbers_of_numpy_fill_a_prompt() -> None:
    wrappers = [f"{__name__}:numpy_numbers"]
    (shown,) = play(LINE, [], wrappers=wrappers, prompt="{at}")[1]
    assert shown.content == play(LINE, [], prompt="{obs.at}", wrappers=wrappers)[1][0].content
    assert play(LINE, [], wrappers=wrappers, prompt="{half}")[1][0].content == ("0.5",)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"make": {"desc": {"call": 3}}}, "call_table_wrong"),
        ({"make": {"desc": [{"call": "builtins:dict", "arg": {}}]}}, "call_table_wrong"),
        ({"prompt": "Go."}, "image_places_mismatch"),
        ({"image": "none"}, "image_places_mismatch"),
        ({"actions": ["left", "Left"]}, "action_names_unclear"),
        ({"actions": ["left", "a, b"]}, "action_names_unclear"),
        ({"actions": [], "actions_per_turn": 2}, "several_texts"),
        ({"success": "reward"}, "string_pattern_mismatch"),
    ],
)
def test_rejects_contradictory_settings(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        settings_of({**LAKE, "prompt": "{image}Go.", **changes})
    assert code in [each["type"] for each in refusal.value.errors()] or code in str(refusal.value)


def test_versions_and_own_code_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_PROJECT", str(tmp_path))
    (tmp_path / "own_line.py").write_text("A = 1\n")
    sources = environment_sources(settings_of(BABY, modules=["minigrid", "own_line"]))
    assert sources["gymnasium"] == gymnasium.__version__ and {"minigrid", "own_line", "code"} <= set(sources)
    assert sources["minigrid"] != sources["own_line"]


def test_recipe_of_the_page_is_valid(tmp_path: Path) -> None:
    text, *_ = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in text.splitlines() if line]) == 13
    (tmp_path / "own.toml").write_text(text)
    recipe: Any = load_recipe(str(tmp_path / "own.toml"))
    refuse_ahead(recipe.sections["environment"], "", 16, 0)


def test_own_class_of_the_page_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_PROJECT", str(tmp_path))
    shutil.copy(PAGE.parents[1] / "examples/line.py", tmp_path)
    args: dict[str, Any] = {"id": "Line-v0", "modules": ["line"], "actions": ["left", "right"], "max_turns": 16}
    args["success"] = "terminated"
    refuse_ahead(settings_of(args), "", 16, 0)
    assert play(args, ["left"] * 8 + ["right"] * 8)[2][-1].reward_parts["success"] == 1
