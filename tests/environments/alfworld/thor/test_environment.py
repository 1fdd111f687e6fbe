"""Games in AI2-THOR, with the installed ai2thor and alfworld and a stand-in for the player program."""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest
from PIL import Image

from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.alfworld.games.game import KINDS
from armature.components.environments.alfworld.packaged import names_of
from armature.components.environments.alfworld.thor.environment import AlfworldThor, ThorEpisode, encode_frame
from armature.components.environments.alfworld.thor.metadata import PlayerError
from armature.components.environments.alfworld.thor.pool import ThorPlayerPool
from tests.refusals import refused

from .thor_games import Kitchen, alfworlds_names, environment, pddl, settings, stand_in

if TYPE_CHECKING:
    from armature.components.environments.alfworld.thor.player import ThorPlayer

ResultT = TypeVar("ResultT")

pytest.importorskip("ai2thor")
pytestmark = pytest.mark.timeout(120)

LAYOUTS = Path(str(find_spec("alfworld").origin)).parent / "gen/layouts"  # type: ignore[union-attr]


def receptacles(scene: int) -> list[str]:
    return list(json.loads((LAYOUTS / f"FloorPlan{scene}-openable.json").read_text()))


APPLES = ["Apple|+00.93|+00.96|-02.04", "Apple|-01.24|+00.98|-00.64"]
COUNTER, OTHER_COUNTER = "CounterTop|+00.93|+00.95|-02.05", "CounterTop|-01.24|+00.97|-00.64"
KITCHEN = Kitchen(10, receptacles(10), APPLES, start=(-3.5, -2.0))
NAME = alfworlds_names([*KITCHEN.receptacles, *APPLES])
CALLED = {name.rpartition(" ")[0]: name for name in NAME.values()}
FRIDGE, MICROWAVE, SINK, BIN = (CALLED[kind] for kind in ("fridge", "microwave", "sinkbasin", "garbagecan"))
HERE, THERE, APPLE, OTHER_APPLE = NAME[COUNTER], NAME[OTHER_COUNTER], NAME[APPLES[0]], NAME[APPLES[1]]
TAKE = [f"go to {HERE}", f"take {APPLE} from {HERE}"]
BEDROOM_DESK = next(place for place in receptacles(301) if place.startswith("Desk|"))


def beside(place: str, kind: str) -> str:
    x, y, z = (float(part) for part in place.split("|")[1:4])
    return f"{kind}|{x + 0.01:+06.2f}|{y:+06.2f}|{z:+06.2f}"


BEDROOM = Kitchen(301, receptacles(301), [beside(BEDROOM_DESK, "DeskLamp"), beside(BEDROOM_DESK, "Mug")], (0.0, -1.0))
DESK = alfworlds_names(BEDROOM.receptacles)[BEDROOM_DESK]

PUT = [*TAKE, f"go to {BIN}", f"move {APPLE} to {BIN}"]
PLACE = KITCHEN.task("pick_and_place_simple", "Apple", "GarbageCan", plan=PUT)
WARM = [*TAKE, f"go to {MICROWAVE}", f"heat {APPLE} with {MICROWAVE}", f"go to {BIN}", f"move {APPLE} to {BIN}"]
HEAT = KITCHEN.task("pick_heat_then_place_in_recep", "Apple", "GarbageCan", plan=WARM)
COOL = [*TAKE, f"go to {FRIDGE}", f"cool {APPLE} with {FRIDGE}", f"go to {BIN}", f"move {APPLE} to {BIN}"]
CLEAN = [*TAKE, f"go to {SINK}", f"clean {APPLE} with {SINK}", f"go to {FRIDGE}", f"open {FRIDGE}"]
SECOND = [f"go to {THERE}", f"take {OTHER_APPLE} from {THERE}", f"go to {BIN}", f"move {OTHER_APPLE} to {BIN}"]
LIGHT = [f"go to {DESK}", f"take mug 1 from {DESK}", "use desklamp 1"]
TASKS = {
    "place": PLACE,
    "heat": HEAT,
    "cool": KITCHEN.task("pick_cool_then_place_in_recep", "Apple", "GarbageCan", plan=COOL),
    "clean": KITCHEN.task(
        "pick_clean_then_place_in_recep", "Apple", "Fridge", plan=[*CLEAN, f"move {APPLE} to {FRIDGE}"]
    ),
    "two": KITCHEN.task("pick_two_obj_and_place", "Apple", "GarbageCan", plan=[*PUT, *SECOND]),
    "look": BEDROOM.task("look_at_obj_in_light", "Mug", toggle="DeskLamp", plan=LIGHT),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder, patch)
        yield folder


@pytest.fixture(scope="module")
def played(home: Path) -> Iterator[AlfworldThor]:
    reward = {"name": "potential", "won_weight": 10.0, "progress_weight": 1.0}
    with closing(environment(processes=2, reward=reward)) as made:
        yield made


@pytest.fixture
def alone(home: Path) -> Iterator[AlfworldThor]:
    """An environment with one player."""
    with closing(environment(processes=1)) as made:
        yield made


@pytest.fixture
def player(home: Path) -> Iterator[ThorPlayer]:
    from armature.components.environments.alfworld.thor.player import ThorPlayer

    made = ThorPlayer("5.0", width=300, height=300)
    yield made
    made.stop()


def begin(player: ThorPlayer) -> Any:
    """Begin a game and return alfworld's agent in front of the counter with the apple."""
    agent = player.begin(PLACE.payload["trajectory"], "do it", names_of(PLACE.payload["problem"]))
    agent.act(TAKE[0])
    return agent


def say(action: str) -> str:
    return f"<think>so</think><action>{action}</action>"


async def elsewhere(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine in a thread with its own event loop, as rollouts do, because episodes block."""
    return await asyncio.to_thread(asyncio.run, work)


async def play(where: AlfworldThor, task: Task, answers: Sequence[str]) -> tuple[list[Observation], list[Outcome]]:
    episode = where.episode(task)
    try:
        observations, outcomes = [await episode.reset()], []
        for answer in answers:
            outcomes.append(await episode.step(answer))
            if outcomes[-1].observation is None:
                break
            observations.append(outcomes[-1].observation)
        return observations, outcomes
    finally:
        await episode.close()


def players() -> list[psutil.Process]:
    """The running stand-in players that our process started."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if any(part.endswith("thor_player") for part in command) and "-I" not in command and "/bin/sh" not in command:
            processes.append(process)
    return processes


def image_of(observation: Observation) -> Image.Image:
    frame = observation.content[0]
    assert isinstance(frame, EncodedImage)
    return Image.open(io.BytesIO(frame.data))


def said(observation: Observation) -> str:
    text = observation.content[1]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_plan_wins_each_kind_of_game(played: AlfworldThor, kind: str) -> None:
    task = TASKS[kind]
    answers = played.demonstration(task)
    _, outcomes = asyncio.run(play(played, task, answers))
    assert [outcome.action_defect for outcome in outcomes] == [None] * len(answers)
    assert [outcome.reward_parts["won"] for outcome in outcomes] == [0.0] * (len(answers) - 1) + [1.0]
    assert outcomes[-1].done


def test_plans_win_generated_games(played: AlfworldThor) -> None:
    games = {"source": "generated", "kinds": KINDS, "rooms": ["Kitchen", "LivingRoom", "Bedroom", "Bathroom"]}
    games |= {"density": 0.6, "most_instances": 2, "most_receptacles": 8}
    listed = AlfworldThor(settings(games=games), train_tasks=6, heldout_tasks=6, seed=3, processes=1)
    tasks = [*listed.tasks("train"), *listed.tasks("heldout")]
    assert {task.payload["kind"] for task in tasks} == set(KINDS)
    assert len({task.task_id for task in tasks}) == 12
    assert tasks == [*listed.tasks("train"), *listed.tasks("heldout")]

    async def won(task: Task) -> float:
        copied = Task(task.task_id, task.split, json.loads(json.dumps(task.payload)))
        _, outcomes = await play(played, copied, listed.demonstration(task))
        return outcomes[-1].reward_parts["won"]

    async def everything() -> list[float]:
        return await asyncio.gather(*(elsewhere(won(task)) for task in tasks))

    assert asyncio.run(everything()) == [1.0] * 12


def test_episodes_of_a_task_are_equal_for_any_random_state(played: AlfworldThor) -> None:
    async def group() -> list[Any]:
        random.seed(1)
        first = await play(played, HEAT, played.demonstration(HEAT)[:3])
        random.seed(2)
        await play(played, TASKS["look"], [])
        two = (elsewhere(play(played, HEAT, played.demonstration(HEAT)[:3])) for _ in range(2))
        return [first, *await asyncio.gather(*two)]

    one, two, three = asyncio.run(group())
    assert one == two == three
    assert said(one[0][0]).count("Your task is to: put a apple somewhere.") == 1


def test_observation_has_frame_text_and_text_anchor(played: AlfworldThor) -> None:
    observations, _ = asyncio.run(play(played, PLACE, [say(TAKE[0]), say("look")]))
    for observation in observations:
        image = image_of(observation)
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (300, 300))
    assert not played.dialogue
    assert observations[1].anchor_key == f"You arrive at loc 4. On the {HERE}, you see a {APPLE}."
    assert observations[1].anchor_key in said(observations[1])
    assert f"'take {APPLE} from {HERE}'" in said(observations[1])
    assert f"take {APPLE} from {HERE}" in (observations[1].admissible_actions or ())


def test_frames_are_rgb_of_requested_size_without_gpu(player: ThorPlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail(*arguments: object, **more: object) -> None:
        raise AssertionError("a frame went to a GPU")

    monkeypatch.setattr(torch.Tensor, "cuda", fail)
    player.width = 400
    begin(player)
    assert player.frame().shape == (300, 400, 3)
    image = Image.open(io.BytesIO(encode_frame(player.frame()).data))
    assert image.size == (400, 300)
    red, green, blue = player.last_event.object_id_to_color[COUNTER]
    assert red != blue
    assert image.getpixel((0, 0)) == (red, green, blue)
    player.width = 500
    with refused("frame_size_mismatch", "500x300", "400x300"):
        player.frame()


def test_step_takes_action_as_arguments_or_dict(player: ThorPlayer) -> None:
    for passed in (lambda **action: player.step(**action), lambda **action: player.step(action)):
        begin(player)
        assert passed(action="PickupObject", objectId=APPLES[0], forceAction=True)
        assert player.last_event.metadata["inventoryObjects"][0]["objectId"] == APPLES[0]
    assert not player.step("OpenObject", objectId="Fridge|+09.00|+00.00|+00.00")
    with refused("action_refused", "OpenObject"):
        player.step("OpenObject", objectId="Fridge|+09.00|+00.00|+00.00", raise_for_failure=True)
    with refused("unknown_action", "'Dance'"):
        player.step("Dance")


def test_refused_action_changes_nothing(player: ThorPlayer) -> None:
    agent = begin(player)
    agent.get_object(FRIDGE, agent.receptacles)["locs"] = {**agent.curr_loc, "x": 99.0}
    before = agent.get_admissible_commands()
    assert agent.act(f"go to {FRIDGE}") == ("Nothing happens.", True)
    assert agent.get_admissible_commands() == before
    agent.act(f"go to {MICROWAVE}")
    agent.get_object(MICROWAVE, agent.receptacles)["object_id"] = "Microwave|+09.00|+00.00|+00.00"
    assert agent.act(f"open {MICROWAVE}") == ("Nothing happens.", True)
    assert f"open {MICROWAVE}" in agent.get_admissible_commands()


def test_put_and_move_commands_are_equivalent(played: AlfworldThor) -> None:
    for words in (f"move {APPLE} to {BIN}", f"put {APPLE} in/on {BIN}"):
        _, outcomes = asyncio.run(play(played, PLACE, [say(word) for word in [*TAKE, f"go to {BIN}", words]]))
        assert outcomes[-1].reward_parts["won"] == 1.0
        assert outcomes[-1].action_defect is None


@pytest.mark.parametrize(
    ("answer", "defect"),
    [
        (say(f"take {APPLE} from {BIN}"), "inadmissible"),
        (say(f"move {APPLE} to {BIN}"), "inadmissible"),
        (say("open the pod bay doors"), "inadmissible"),
        (say("help"), "inadmissible"),
        ("I would rather not", "format"),
        ("", "format"),
        ("\0" * 50_000, "format"),
        (say("look"), None),
    ],
)
def test_invalid_actions_do_nothing_and_report_defect(played: AlfworldThor, answer: str, defect: str | None) -> None:
    observations, outcomes = asyncio.run(play(played, PLACE, [say(TAKE[0]), answer]))
    assert outcomes[1].action_defect == defect
    assert (observations[2].anchor_key == "Nothing happens.") == (defect is not None)
    assert outcomes[1].reward_parts == {"won": 0.0, "progress": 0.0}


def test_progress_is_rewarded_once(played: AlfworldThor) -> None:
    waiting = [say("look")] * 8
    plan = list(played.demonstration(HEAT))
    _, outcomes = asyncio.run(play(played, HEAT, [*plan[:4], *waiting, *plan[4:]]))
    progress = [outcome.reward_parts["progress"] for outcome in outcomes]
    assert progress[:4] == pytest.approx([0, 0, 0, 1 / 3])
    assert progress[4:12] == [0.0] * 8
    assert progress[12:] == pytest.approx([0, 2 / 3])
    assert sum(progress) == pytest.approx(1.0)


def test_one_player_serves_many_episodes(home: Path) -> None:
    before = {process.pid for process in players()}

    async def several() -> set[int]:
        seen: set[int] = set()

        async def one() -> None:
            await play(made, PLACE, [say(TAKE[0])])
            seen.update(process.pid for process in players() if process.pid not in before)

        await asyncio.gather(*(elsewhere(one()) for _ in range(4)))
        return seen

    with closing(environment(processes=1)) as made:
        assert len(asyncio.run(several())) == 1
    assert {process.pid for process in players()} == before


def test_dead_player_fails_its_episode_and_is_replaced(alone: AlfworldThor) -> None:
    before = {process.pid for process in players()}

    async def killed() -> None:
        episode = alone.episode(PLACE)
        await episode.reset()
        (player,) = (process for process in players() if process.pid not in before)
        player.kill()
        started = time.monotonic()
        with refused("player_ended"):
            await episode.step(say(TAKE[0]))
        assert time.monotonic() - started < 30
        await episode.close()

    asyncio.run(killed())
    _, outcomes = asyncio.run(play(alone, PLACE, alone.demonstration(PLACE)))
    assert outcomes[-1].reward_parts["won"] == 1.0


def test_hanging_player_fails_its_episode_in_time(home: Path) -> None:
    from armature.components.environments.alfworld.thor.player import ThorPlayer

    before = {process.pid for process in players()}
    lent = ThorPlayerPool(lambda: ThorPlayer("5.0", width=300, height=300, answer_seconds=1.0), 1)
    wanted = settings()
    episode = ThorEpisode(PLACE, wanted.prompt, wanted.reward, lent)
    asyncio.run(episode.reset())
    (player,) = (process for process in players() if process.pid not in before)
    player.send_signal(signal.SIGSTOP)
    with refused("player_timeout"):
        asyncio.run(episode.step(say(TAKE[0])))
    asyncio.run(episode.close())
    assert not player.is_running() or player.status() == psutil.STATUS_ZOMBIE
    lent.close()
    with refused("environment_closed"):
        lent.take()


@pytest.mark.parametrize(
    ("program", "code"),
    [("import sys; sys.exit(3)", "player_ended"), ("import time; time.sleep(60)", "player_timeout")],
)
def test_player_that_never_starts_fails_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: str
) -> None:
    from armature.components.environments.alfworld.thor.player import ThorPlayer

    script = tmp_path / "broken.py"
    script.write_text(program)
    stand_in(tmp_path, monkeypatch, script)
    with refused(code):
        ThorPlayer("5.0", width=300, height=300, start_seconds=2.0)


def test_close_ends_waiting_and_running_episodes(home: Path) -> None:
    small = environment(processes=1)
    before = {process.pid for process in players()}

    async def closed() -> None:
        playing, waiting = small.episode(PLACE), small.episode(PLACE)
        await playing.reset()
        reset = asyncio.create_task(elsewhere(waiting.reset()))
        await asyncio.sleep(0.2)
        assert not reset.done()
        small.close()
        with refused("environment_closed"):
            await reset
        with pytest.raises(PlayerError):
            await playing.step(say(TAKE[0]))
        await playing.close()

    asyncio.run(closed())
    assert {process.pid for process in players()} == before


def test_plans_win_games_with_thor_release_2_1(home: Path) -> None:
    with closing(environment(player="2.1", width=320, height=240)) as made:
        for task in (PLACE, HEAT):
            observations, outcomes = asyncio.run(play(made, task, made.demonstration(task)))
            assert outcomes[-1].reward_parts["won"] == 1.0
            assert image_of(observations[0]).size == (320, 240)


def test_rejects_invalid_and_unknown_scenes(played: AlfworldThor) -> None:
    poses = [{"objectName": "Apple", "position": {"x": 0, "y": 0, "z": "nan"}, "rotation": {"x": 0, "y": 0, "z": 0}}]
    odd = ({"scene_num": 99.5}, {"scene_num": 0}, {"object_poses": poses}, {"init_action": {"action": "Dance"}})
    for changes in odd:
        with refused("not_a_thor_game"):
            played.episode(KITCHEN.task("pick_and_place_simple", "Apple", "GarbageCan", **changes))
    with refused("unknown_scene", "FloorPlan99"):
        asyncio.run(play(played, KITCHEN.task("pick_and_place_simple", "Apple", "GarbageCan", scene_num=99), []))
    _, outcomes = asyncio.run(play(played, PLACE, played.demonstration(PLACE)))
    assert outcomes[-1].reward_parts["won"] == 1.0


def test_names_equal_those_of_the_text_game() -> None:
    things = ["Apple|-00.10|+01.00|+02.00", "Apple|+00.10|-01.00|+02.00", "Mug|+00.00|+00.00|+00.00"]
    for scene in (1, 10, 210, 301, 420):
        places = receptacles(scene)
        problem = Kitchen(scene, places, things).task("pick_and_place_simple", "Apple", "Shelf").payload["problem"]
        expected = alfworlds_names([*places, *things])
        assert names_of(problem) == {object_id.lower(): name for object_id, name in expected.items()}
    assert pddl("Apple|-00.10") == "Apple_bar__minus_00_dot_10"


def test_player_leaves_no_files_in_the_home_folder(played: AlfworldThor, home: Path) -> None:
    asyncio.run(play(played, PLACE, []))
    assert not (home / ".ai2thor").exists()


def test_launch_arguments_select_program_and_display(tmp_path: Path) -> None:
    from armature.components.environments.alfworld.thor.player import CloudRendering, launch_arguments

    def absent(name: str) -> None:
        return None

    assert launch_arguments("5.0", {}, lambda name: "libvulkan.so.1") == {"platform": CloudRendering}
    assert launch_arguments("5.0", {"DISPLAY": ":7"}, absent) == {"x_display": ":7"}
    with refused("display_missing", "libvulkan1", "DISPLAY"):
        launch_arguments("5.0", {}, absent)
    with refused("player_not_downloadable", "ARMATURE_THOR_PLAYER"):
        launch_arguments("2.1", {"DISPLAY": ":7"}, absent)
    with refused("player_not_executable", "ARMATURE_THOR_PLAYER"):
        launch_arguments("5.0", {"ARMATURE_THOR_PLAYER": str(tmp_path)}, absent)
