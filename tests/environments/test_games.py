"""Tests of the environments colors, digits, motion, recall and coordinates that do not apply to all environments."""

from __future__ import annotations

import asyncio
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from armature.components.artifacts.videos import decode_video
from armature.components.contracts.episodes import Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.coordinates import Coordinates, CoordinatesSettings, parse_point
from armature.components.environments.digits import Digits, DigitsSettings, side_by_side
from armature.components.environments.generated import ColorImageSettings, color_image, color_reward
from armature.components.environments.make import refuse_ahead
from armature.components.environments.motion import WAYS, MotionSettings, moving_square
from armature.components.environments.recall import Recall, RecallSettings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import SPLITS
from tests.refusals import refused

from .conftest import COLORS, EXAMPLES, IMAGE

LOOKS = ColorImageSettings.model_validate(IMAGE)


def pixels(image: EncodedImage) -> np.ndarray:
    with Image.open(io.BytesIO(image.data)) as opened:
        return np.asarray(opened.convert("RGB"), dtype=float)


@pytest.mark.parametrize("color", COLORS)
def test_color_image_is_noisy_and_nearest_to_its_color(color: str) -> None:
    for seed in range(20):
        image = pixels(color_image(color, seed, LOOKS))
        assert image.shape == (56, 56, 3)
        mean = image.mean(axis=(0, 1))
        assert min(COLORS, key=lambda name: float(np.linalg.norm(mean - COLORS[name]))) == color
        assert image.std(axis=(0, 1)).max() > 8


def test_heldout_digits_are_never_shown_in_training() -> None:
    environment = Digits(DigitsSettings(), train_tasks=4096, heldout_tasks=1024, seed=0, processes=1)
    train, heldout = ({row for task in environment.tasks(split) for row in task.payload["rows"]} for split in SPLITS)
    assert len(train) > 1400
    assert len(heldout) > 340
    assert train.isdisjoint(heldout)
    assert max(train | heldout) < 1797


def test_digits_are_shown_from_left_to_right_and_demonstrated_as_labeled() -> None:
    table = load_digits()
    image = pixels(side_by_side([7, 1242], 8))
    assert np.abs(image[..., 0] / 255 * 16 - np.concatenate(table.images[[7, 1242]], axis=1)).max() < 0.04
    (task,) = Digits(DigitsSettings(), train_tasks=1, heldout_tasks=1, seed=3, processes=1).tasks("heldout")
    left, right = table.target[task.payload["rows"]]
    (answer,) = Digits(DigitsSettings(), train_tasks=1, heldout_tasks=1, seed=3, processes=1).demonstration(task)
    assert answer == f"{left} + {right} = {left + right}"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *((answer, 1.0) for answer in ("7", "3 + 4 = 7", " 7.\n", "07")),
        *((answer, 0.0) for answer in ("7 = 3 + 4", "17", "", "-7", "0.7", f"{'9' * 9}7", f"{'9' * 5000}7")),
    ],
)
def test_last_number_is_graded(answer: str, reward: float) -> None:
    three, four = (int((load_digits().target == digit).argmax()) for digit in (3, 4))
    episode = Digits(DigitsSettings(), train_tasks=1, heldout_tasks=1, seed=0, processes=1).episode(
        Task("digits-train-00000", "train", {"rows": [three, four]})
    )
    assert asyncio.run(episode.step(answer)).reward_parts == {"correct": reward}


def columns(way: str, seed: int, settings: MotionSettings) -> list[int]:
    """Return the square's left column in each frame. A square that leaves at the right side goes on at the left one."""
    places = []
    for frame in decode_video(moving_square(way, seed, settings)).frames:
        bright = np.asarray(frame, dtype=float).mean(axis=(0, 2))
        around = np.concatenate([bright, bright[: settings.square - 1]])
        places.append(int(np.convolve(around, np.ones(settings.square), "valid").argmax()))
    return places


def test_square_moves_its_way_from_any_column_around() -> None:
    settings = MotionSettings(noise=0.0, square=8, pixels_per_frame=5)
    begins: dict[str, set[int]] = {way: set() for way in WAYS}
    for seed in range(200):
        for way, step in (("right", 5), ("left", -5)):
            places = columns(way, seed, settings)
            assert places == [(places[0] + number * step) % 28 for number in range(4)]
            begins[way].add(places[0])
    assert begins["left"] == begins["right"] == set(range(28))


def test_shuffled_frames_do_not_tell_the_direction() -> None:
    """Both directions show the same frames, and their order is as often forward as backward."""
    settings = MotionSettings(noise=0.0)
    shuffled = settings.model_copy(update={"shuffled": True})
    steps: dict[str, list[int]] = {way: [] for way in WAYS}
    for seed in range(100):
        assert sorted(columns("left", seed, settings)) == sorted(columns("right", seed, settings))
        for way in WAYS:
            places = columns(way, seed, shuffled)
            assert sorted(places) == sorted(columns(way, seed, settings))
            steps[way] += np.diff(places).tolist()
    for each in steps.values():  # 7 or -21 is a step to the right, -7 or 21 one to the left
        forward, backward = (sum(step % 28 == way for step in each) for way in (7, 21))
        assert abs(forward - backward) < 0.2 * (forward + backward)


@pytest.mark.parametrize("values", [{"pixels_per_frame": 14}, {"square": 28}])
def test_rejects_motion_without_a_visible_direction(values: dict[str, int]) -> None:
    with refused("direction_ambiguous", "28"):
        MotionSettings.model_validate(values)


def test_motion_needs_servers_that_accept_videos() -> None:
    part = {"name": "motion", "train_tasks": 2, "heldout_tasks": 2}
    parts = {"parts": {"one": part, "other": {**part, "name": "colors"}}}
    for settings in (part, {"name": "mixture", "args": parts}):
        environment = EnvironmentSettings.model_validate(settings)
        with refused("too_many_videos", "motion", "max_videos_per_prompt = 1"):
            refuse_ahead(environment, "", 16, 0)
        refuse_ahead(environment, "", 16, 1)


def test_color_image_without_noise_is_uniform() -> None:
    still = LOOKS.model_copy(update={"noise": 0.0, "tint_jitter": 0.0, "brightness_jitter": 0.0})
    assert (pixels(color_image("orange", 3, still)) == COLORS["orange"]).all()


def test_order_of_colors_does_not_change_settings() -> None:
    """PostgreSQL returns the keys of JSON objects sorted by length, then by name."""
    more = {"teal": (0, 128, 128), **COLORS, "cyan": (0, 255, 255)}
    for palette in (COLORS, more):
        reordered = {name: palette[name] for name in sorted(palette, key=lambda name: (len(name), name))}
        one, other = (ColorImageSettings.model_validate({**IMAGE, "colors": each}) for each in (palette, reordered))
        assert one.model_dump_json() == other.model_dump_json()
    assert ColorImageSettings().names == LOOKS.names == tuple(COLORS)


@pytest.mark.parametrize("answer", ["red", ' "Red". \n', "**RED**"])
def test_color_name_with_punctuation_is_correct(answer: str) -> None:
    assert color_reward(answer, "red", LOOKS) == {"correct": 1, "format": 1}
    assert color_reward(answer, "blue", LOOKS) == {"correct": 0, "format": 1}


@pytest.mark.parametrize("answer", ["red red", "it is red", "redd", "", "rot"])
def test_answer_that_is_not_one_color_earns_nothing(answer: str) -> None:
    assert color_reward(answer, "red", LOOKS) == {"correct": 0, "format": 0}


@pytest.mark.timeout(20)
def test_color_reward_takes_linear_time() -> None:
    for answer in ("!" * 300_000 + "red" + "!" * 300_000, "red" + "!" * 300_000 + "a", "a!" * 200_000):
        assert color_reward(answer, "red", LOOKS)["correct"] == float(answer.strip("!") == "red")


@pytest.mark.parametrize("name", ["Red", "red.", "", " red", "_red"])
def test_rejects_color_names_that_no_answer_can_equal(name: str) -> None:
    with refused("value_error", "colors", repr(name)):
        ColorImageSettings.model_validate({**IMAGE, "colors": {name: [1, 2, 3], "blue": [4, 5, 6]}})


def recall(**changes: object) -> Recall:
    settings = RecallSettings.model_validate({**EXAMPLES["recall"].args, **changes})
    return Recall(settings, train_tasks=160, heldout_tasks=8, seed=1, processes=1)


async def observe(environment: Recall, task: Task) -> list[tuple[str | EncodedImage, ...]]:
    episode = environment.episode(task)
    shown = [(await episode.reset()).content]
    while (outcome := await episode.step("ok")).observation is not None:
        assert not outcome.reward_parts
        shown.append(outcome.observation.content)
    return shown


@pytest.mark.parametrize("asked", ["first", "last", "random"])
def test_recall_shows_images_then_fillers_then_question(asked: str) -> None:
    environment = recall(images=3, filler_turns=2, asked=asked)
    assert environment.max_turns == 6
    for task in environment.tasks("train"):
        shown = asyncio.run(observe(environment, task))
        for number, content in enumerate(shown[:3]):
            expected = color_image(task.payload["colors"][number], task.payload["seed"] + number * 2**64, LOOKS)
            assert content == (expected, f"Remember image {number + 1}.")
        assert shown[3:5] == [("Go on.",), ("Go on.",)]
        assert shown[5] == (f"What colour was image {task.payload['asked'] + 1}?",)
        assert task.payload["asked"] in {"first": [0], "last": [2], "random": [0, 1, 2]}[asked]
        assert len(set(task.payload["colors"])) == 3


def test_no_constant_answer_to_recall_beats_chance() -> None:
    environment = recall(images=2, asked="random")
    answers = Counter(task.payload["colors"][task.payload["asked"]] for task in environment.tasks("train"))
    assert set(answers.values()) == {160 // 8}
    assert {task.payload["asked"] for task in environment.tasks("train")} == {0, 1}


def test_recall_without_fillers_asks_in_the_second_turn() -> None:
    environment = recall(images=1, filler_turns=0, asked="first", question="What colour was it?")
    shown = asyncio.run(observe(environment, next(iter(environment.tasks("train")))))
    assert len(shown) == 2 and shown[1] == ("What colour was it?",)


def test_rejects_unanswerable_recall_settings() -> None:
    with refused("number_place_missing"):
        recall(question="What colour was it?")
    with refused("too_few_colors", 9, 8):
        recall(images=9)


@pytest.mark.parametrize(
    ("answer", "point"),
    [
        ("3,1", (3, 1)),
        (" (3.5, 12) ", (3.5, 12)),
        ("3, 1.", (3, 1)),
        ("-3,1", (-3, 1)),
        (r"\boxed{3,1}", (3, 1)),
        (r"So \boxed{1,1}, no: \boxed{ (3, 1) } it is", (3, 1)),
        *((answer, None) for answer in ("3;1", "3 1", "it is 3,1", "3,1,2", "inf,1", "1e9,1", r"\boxed{}")),
    ],
)
def test_parse_point(answer: str, point: tuple[float, float] | None) -> None:
    assert parse_point(answer) == point


def coordinates(**changes: object) -> Coordinates:
    settings = CoordinatesSettings.model_validate({**EXAMPLES["coordinates"].args, **changes})
    return Coordinates(settings, train_tasks=64, heldout_tasks=8, seed=1, processes=1)


def test_dot_position_matches_task_with_y_downwards() -> None:
    environment = coordinates()
    for task in environment.tasks("train"):
        (image, question) = asyncio.run(environment.episode(task).reset()).content
        assert isinstance(image, EncodedImage) and isinstance(question, str)
        assert "upper left" in question and "y downwards" in question and "0 to 111" in question
        rows, columns = np.nonzero(pixels(image)[:, :, 1] < 128)
        assert (columns.mean(), rows.mean()) == (task.payload["x"], task.payload["y"])


def test_bisection_by_hints_finds_the_dot() -> None:
    environment = coordinates(guesses=10, tolerance=0.5)

    async def search(task: Task) -> tuple[int, dict[str, float]]:
        episode = environment.episode(task)
        await episode.reset()
        low, high = [0, 0], [111, 111]
        for guesses in range(1, 11):
            guess = [(low[axis] + high[axis]) // 2 for axis in (0, 1)]
            outcome = await episode.step(f"{guess[0]},{guess[1]}")
            if outcome.observation is None:
                return guesses, dict(outcome.reward_parts)
            hint = outcome.observation.content[-1]
            assert isinstance(hint, str)
            for axis, (less, more) in enumerate((("left", "right"), ("up", "down"))):
                if less in hint:
                    high[axis] = guess[axis] - 1
                elif more in hint:
                    low[axis] = guess[axis] + 1
                else:
                    low[axis] = high[axis] = guess[axis]
        raise AssertionError("not found")

    for task in environment.tasks("train"):
        guesses, parts = asyncio.run(search(task))
        assert guesses <= 7 and parts == {"hit": 1.0, "closeness": 1.0, "format": 1.0}


def test_closeness_falls_with_distance_and_stays_in_0_to_1() -> None:
    environment = coordinates(guesses=1)
    task = Task("t", "train", {"x": 50, "y": 60, "seed": 0})

    def parts(answer: str) -> dict[str, float]:
        return dict(asyncio.run(environment.episode(task).step(answer)).reward_parts)

    assert parts("50,60") == {"hit": 1.0, "closeness": 1.0, "format": 1.0}
    assert parts("50,63") == {"hit": 1.0, "closeness": 1 - 3 / 112, "format": 1.0}
    assert parts("50,64") == {"hit": 0.0, "closeness": 1 - 4 / 112, "format": 1.0}
    assert parts("-99999,0") == {"hit": 0.0, "closeness": 0.0, "format": 1.0}
    assert parts("there") == {"hit": 0.0, "closeness": 0.0, "format": 0.0}


def test_unparsable_guess_is_invalid_and_loses_format_reward() -> None:
    environment = coordinates(guesses=2, show_guess=False)
    task = Task("t", "train", {"x": 50, "y": 60, "seed": 0})

    async def twice() -> None:
        episode = environment.episode(task)
        await episode.reset()
        first = await episode.step("there")
        assert first.action_defect == "format" and first.observation is not None
        second = await episode.step("50,60")
        assert second.action_defect is None and second.reward_parts == {"hit": 1.0, "closeness": 1.0, "format": 0.0}

    asyncio.run(twice())
