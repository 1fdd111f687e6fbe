"""Each perturbation changes what it should, depending on kind, strength and seed, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.robots.libero.perturbations.apply import LANGUAGE, PLACED, SEEN, SYNONYMS, paraphrase
from armature.components.robots.libero.perturbations.scene import (
    DISTRACTORS,
    FAR,
    JOINTS,
    LAYOUT,
    PerturbedScene,
    bounds,
    distance,
)
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.settings import Perturbation, PerturbationSettings
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import MAX_STEPS, suite_tasks
from tests.robots.libero.simulated import needs_libero, physics, simulator

pytestmark = needs_libero

SETTINGS = simulator(num_steps_wait=10)
NAMES = tuple(PerturbationSettings.model_fields)
MODEL = {
    "camera": {"cam_pos", "cam_quat", "cam_fovy"},
    "light": {"light_pos", "light_dir", "light_diffuse"},
    "texture": {"mat_rgba", "tex_data"},
}
"""Names of the arrays of the physics model that perturbations change."""
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (2, 7))


@dataclass(frozen=True)
class Begin:
    """State of the simulator at the start of an episode, and its state after two actions."""

    model: dict[str, NDArray[Any]]
    state: NDArray[np.float64]
    images: dict[str, NDArray[np.uint8]]
    words: str
    places: dict[str, NDArray[np.float64]]
    joints: NDArray[np.float64]
    deepest: float
    later: NDArray[np.float64]

    def same_bytes(self, other: Begin) -> bool:
        return (
            self.words == other.words
            and np.array_equal(self.state, other.state)
            and np.array_equal(self.later, other.later)
            and all(np.array_equal(image, other.images[name]) for name, image in self.images.items())
        )


def where(scene: PerturbedScene) -> tuple[dict[str, NDArray[np.float64]], float]:
    """Return the position of each object, and the smallest contact distance, which is negative if objects penetrate
    each other."""
    places = {name: scene.data.xpos[body].copy() for name, body in (scene.objects | scene.fixtures).items()}
    return places, min(scene.data.contact.dist, default=0.0)


def begin(made: LiberoSimulator, perturbation: Perturbation | None, seed: int = 1000) -> Begin:
    made.reset(0, seed, perturbation)
    scene = PerturbedScene.of(made._environment)
    arrays = {name: getattr(scene.model, name) for name in dir(scene.model) if not name.startswith("_")}
    model = {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    seen, at_first = made.observe(), physics(made)
    places, deepest = where(scene)
    joints = scene.data.qpos[scene.arm].copy()
    for action in ACTIONS:
        made.step(action)
    return Begin(model, at_first, dict(seen.images), seen.task, places, joints, deepest, physics(made))


@pytest.fixture(scope="module")
def made() -> Iterator[LiberoSimulator]:
    simulated = LiberoSimulator(suite_tasks("libero_spatial")[0], SETTINGS)
    yield simulated
    simulated.close()


@pytest.fixture(scope="module")
def plain(made: LiberoSimulator) -> Begin:
    return begin(made, None)


def test_every_perturbation_name_is_implemented() -> None:
    assert {*SEEN, *PLACED, LANGUAGE} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_strength_zero_changes_nothing(made: LiberoSimulator, plain: Begin, name: str) -> None:
    assert begin(made, Perturbation(name, 0.0)).same_bytes(plain)


@pytest.mark.parametrize("name", SEEN)
def test_visual_perturbations_change_images_but_not_states(made: LiberoSimulator, plain: Begin, name: str) -> None:
    changed = begin(made, Perturbation(name, 1.0))
    assert {key for key, array in changed.model.items() if not np.array_equal(array, plain.model[key])} == MODEL[name]
    assert np.array_equal(changed.state, plain.state) and np.array_equal(changed.later, plain.later)
    assert changed.words == plain.words
    for key, image in changed.images.items():
        assert np.abs(image.astype(int) - plain.images[key]).mean() > 2
        assert image.std() > 5  # something is seen
    weaker = begin(made, Perturbation(name, 0.5))
    for key in MODEL[name] - {"cam_quat", "light_dir", "cam_pos", "light_diffuse"}:
        middle = (plain.model[key].astype(float) + changed.model[key]) / 2
        np.testing.assert_allclose(weaker.model[key], middle, rtol=0, atol=1 if key == "tex_data" else 1e-6)
    assert not begin(made, Perturbation(name, 1.0), seed=1001).same_bytes(changed)


@pytest.mark.parametrize(("name", "limit"), [("layout", LAYOUT), ("distractors", DISTRACTORS)])
def test_layout_perturbation_moves_only_objects(made: LiberoSimulator, plain: Begin, name: str, limit: float) -> None:
    scene = PerturbedScene.of(made._environment)
    targets = set(scene.targets)
    changed = begin(made, Perturbation(name, 1.0))
    for thing, place in changed.places.items():
        way = np.linalg.norm(place - plain.places[thing])
        moves = thing in scene.objects and (name == "layout" or thing not in targets)
        assert (limit / 2 - 0.002 < way < limit + 0.002) if moves else way < 1e-4, (thing, way)
        assert abs(place[2] - plain.places[thing][2]) < 1e-3  # on the same surface
    assert changed.words == plain.words
    np.testing.assert_allclose(changed.joints, plain.joints, atol=0.01)
    assert all(np.array_equal(array, plain.model[key]) for key, array in changed.model.items())
    assert changed.deepest > -1e-3
    assert not np.array_equal(changed.images["observation.images.image"], plain.images["observation.images.image"])


def test_robot_perturbation_moves_only_the_robot(made: LiberoSimulator, plain: Begin) -> None:
    changed = begin(made, Perturbation("robot", 1.0))
    ways = np.abs(changed.joints - plain.joints)
    assert ways.max() > 0.02 and (ways < JOINTS + 0.03).all()
    for thing, place in changed.places.items():
        np.testing.assert_allclose(place, plain.places[thing], atol=1e-4)
    assert changed.words == plain.words and changed.deepest > -1e-3
    wrist = "observation.images.image2"
    assert not np.array_equal(changed.images[wrist], plain.images[wrist])


def test_language_perturbation_changes_only_the_instruction(made: LiberoSimulator, plain: Begin) -> None:
    changed = begin(made, Perturbation("language", 0.5))
    assert changed.words != plain.words
    assert begin(made, Perturbation("language", 0.5)).words == changed.words
    assert np.array_equal(changed.later, plain.later)
    assert all(np.array_equal(image, plain.images[name]) for name, image in changed.images.items())


def test_perturbations_do_not_depend_on_process_or_order(made: LiberoSimulator) -> None:
    task, asked = made.task, [Perturbation(name, 1.0) for name in ("layout", "texture", "robot")]
    here = {}
    for one in asked:
        made.reset(3, 7, one)
        here[one] = made.observe()
    with SimulatorProcess(SETTINGS, 300) as process:
        for one in reversed(asked):
            there = process.reset(task, 3, 7, slot=0, perturbation=one)
            assert there.task == here[one].task and np.array_equal(there.state, here[one].state)
            assert all(np.array_equal(image, here[one].images[name]) for name, image in there.images.items()), one


def check_placements(suite: str, index: int, states: range) -> dict[str, float]:
    """Check that no objects penetrate each other and that their heights are unchanged. Return the largest distance that
    each object moved."""
    made, ways = LiberoSimulator(suite_tasks(suite)[index], SETTINGS), dict[str, float]()

    def places_after(state: int, perturbation: Perturbation | None) -> tuple[dict[str, NDArray[np.float64]], float]:
        made.reset(state, 1000 + state, perturbation)
        return where(PerturbedScene.of(made._environment))

    for state in states:
        before, deepest_before = places_after(state, None)
        for name in ("layout", "distractors", "robot"):
            after, deepest = places_after(state, Perturbation(name, 1.0))
            assert deepest > min(-1e-3, deepest_before - 1e-3), (name, state, deepest, deepest_before)
            for thing, place in after.items():
                shift = place - before[thing]
                assert abs(shift[2]) < 0.01, (name, state, thing, shift)
                ways[thing] = max(ways.get(thing, 0.0), float(np.linalg.norm(shift[:2])))
    made.close()
    return ways


def test_stacked_objects_move_together() -> None:
    ways = check_placements("libero_spatial", 5, range(2))  # a bowl on a ramekin
    assert ways["akita_black_bowl_1"] > LAYOUT / 2 - 0.005
    assert ways["wooden_cabinet_1"] == ways["flat_stove_1"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "index"), [("libero_spatial", 4), ("libero_object", 0), ("libero_goal", 1)])
def test_perturbed_placements_are_valid(suite: str, index: int) -> None:
    ways = check_placements(suite, index, range(2))
    if (suite, index) == ("libero_spatial", 4):
        assert ways["akita_black_bowl_1"] < 1e-3  # in a drawer
    assert sum(way > 0.02 for way in ways.values()) >= 2


def test_distances_and_bounds_equal_hand_computation() -> None:
    spheres = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><body pos="0 0 0"><geom size="0.02"/></body><body pos="0.07 0 0"><geom size="0.03"/></body>'
        '<body pos="0.03 0 0"><geom size="0.02"/></body><body pos="0 0 1" euler="0 0 45">'
        '<geom type="box" size="0.1 0.1 0.2"/></body></worldbody></mujoco>'
    )
    data = mujoco.MjData(spheres)
    mujoco.mj_forward(spheres, data)
    assert distance(spheres, data, [0], [1]) == pytest.approx(0.02)
    assert distance(spheres, data, [0], [1, 2]) == pytest.approx(-0.01)
    assert distance(spheres, data, [0], [3]) == distance(spheres, data, [0], []) == FAR
    low, high = bounds(spheres, data, [3])
    np.testing.assert_allclose(high, [0.1 * 2**0.5, 0.1 * 2**0.5, 1.2])
    np.testing.assert_allclose(low, [-0.1 * 2**0.5, -0.1 * 2**0.5, 0.8])


@pytest.mark.parametrize("suite", MAX_STEPS)
def test_paraphrase_keeps_the_task(suite: str) -> None:
    replaced = re.compile(rf"\b({'|'.join(sorted(SYNONYMS, key=len, reverse=True))})\b")
    for task in suite_tasks(suite):
        for seed in range(3):
            paraphrases = [
                paraphrase(task.language, strength, np.random.default_rng(seed)) for strength in (0, 0.3, 0.6, 1)
            ]
            assert paraphrases[0] == task.language
            assert len(set(paraphrases)) == 4, paraphrases
            unchanged = [part.strip() for part in replaced.split(task.language)[::2]]
            for words in paraphrases[1:3]:
                for part in unchanged:
                    assert part in words, words
            assert set(" ".join(unchanged).split()) - {"and"} <= set(re.findall(r"\w+", paraphrases[3]))


def test_paraphrase_equals_hand_written_result() -> None:
    class First(np.random.Generator):
        """Generator that always chooses the first option."""

        def integers(self, *_: object, **__: object) -> int:  # type: ignore[override]
            return 0

    rng = First(np.random.PCG64(0))
    instruction = "pick up the bowl next to the mug and place it on the stove"
    assert paraphrase(instruction, 1 / 3, rng) == "grab the bowl beside the mug and put it on the stove"
    assert paraphrase(instruction, 2 / 3, rng) == "please grab the bowl beside the mug and put it on the stove"
    assert paraphrase(instruction, 0.7, rng) == (
        "there are several things in front of you: please first grab the bowl beside the mug, then put it on the stove"
    )
    assert paraphrase("put both moka pots on the stove", 0.3, rng) == "place both moka pots on the stove"
