"""The simulator and its faster physics, compared with LIBERO and robosuite."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from armature.components.robots.libero.control import _compiled, restore
from armature.components.robots.libero.package import ASSETS, FOLDER, assets_folder, compile_once, use_assets
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.simulator import LiberoSimulator, one_pass, robot_state
from armature.components.robots.libero.tasks import load_initial_states, suite_tasks
from tests.refusals import refused

from .mesh_physics import RECORDED, TASKS, end_state
from .simulated import needs_libero, physics, simulator

pytestmark = needs_libero

DRAWER = 4
"""Index of a task of libero_spatial. In its initial states, a drawer is open by a random amount."""


@pytest.fixture(scope="module")
def drawer() -> Iterator[LiberoSimulator]:
    made = LiberoSimulator(suite_tasks("libero_spatial")[DRAWER], simulator(reflections=True, offscreen_samples=4))
    yield made
    made.close()


def test_images_and_states_equal_libero(drawer: LiberoSimulator) -> None:
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    actions = np.random.default_rng(0).uniform(-1, 1, (3, 7))
    drawer.reset(3, 7)
    seen = [drawer.observe()]
    for action in actions:
        drawer.step(action)
        seen.append(drawer.observe())

    use_assets(assets_folder(compact=True))
    task = drawer.task
    theirs = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=32, camera_widths=32)
    theirs.seed(7)
    theirs.env.object_property_initializers.clear()  # else the drawer is drawn twice
    theirs.reset()
    observed = [theirs.set_init_state(load_initial_states(task)[3])]
    observed += [theirs.step(action)[0] for action in [[0, 0, 0, 0, 0, 0, -1]] * 2 + list(actions)]
    for ours, other in zip(seen, observed[2:], strict=True):
        assert np.array_equal(ours.images["observation.images.image"], other["agentview_image"][::-1, ::-1])
        assert np.array_equal(ours.images["observation.images.image2"], other["robot0_eye_in_hand_image"][::-1, ::-1])
        assert np.array_equal(ours.state[:3], other["robot0_eef_pos"].astype(np.float32))
        assert np.array_equal(ours.state[6:], other["robot0_gripper_qpos"].astype(np.float32))
    assert seen[0].task == "pick up the black bowl in the top drawer of the wooden cabinet and place it on the plate"
    theirs.close()
    drawer.reset(3, 7)  # theirs drew in another context meanwhile and has closed it
    again = drawer.observe()
    for name, image in again.images.items():
        assert np.array_equal(image, seen[0].images[name])


def test_reset_depends_only_on_its_arguments(drawer: LiberoSimulator) -> None:
    drawer.reset(1, 5)
    first, placed = physics(drawer), drawer.site("wooden_cabinet_1_top_side")
    drawer.reset(2, 6)
    assert not np.array_equal(physics(drawer), first)
    drawer.reset(1, 6)
    assert not np.array_equal(drawer.site("wooden_cabinet_1_top_side"), placed)  # the seed moves the furniture
    drawer.reset(51, 5)  # of 50 states
    assert np.array_equal(physics(drawer), first)
    assert np.array_equal(drawer.site("wooden_cabinet_1_top_side"), placed)


def test_cached_models_give_the_images_of_a_fresh_simulator(drawer: LiberoSimulator) -> None:
    def shown(made: LiberoSimulator, state: int, perturbation: Perturbation | None = None) -> bytes:
        made.reset(state, 7, perturbation)
        made.step(np.full(7, 0.3))
        return physics(made).tobytes() + b"".join(image.tobytes() for image in made.observe().images.values())

    fresh = LiberoSimulator(drawer.task, simulator(reflections=True, offscreen_samples=4))
    _compiled.cache_clear()
    plain = [shown(drawer, state) for state in (0, 1)]
    assert _compiled.cache_info().misses == 1
    changes = [Perturbation(name=name, strength=1.0) for name in ("texture", "camera", "layout", "light")]
    changed = [shown(drawer, 0, change) for change in changes]
    assert len({plain[0], *changed}) == 5
    assert [shown(drawer, state) for state in (0, 1)] == plain  # nothing of them is left
    assert shown(drawer, 0, changes[0]) == changed[0]
    assert [shown(fresh, 1), shown(fresh, 0), shown(fresh, 0, changes[0])] == [plain[1], plain[0], changed[0]]
    assert _compiled.cache_info().misses == 1
    fresh.close()
    assert [shown(drawer, state) for state in (0, 1)] == plain


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "index"), TASKS)
def test_compact_shapes_move_like_liberos_meshes(suite: str, index: int) -> None:
    recorded = json.loads(RECORDED.read_text())[f"{suite}/{index}"]
    np.testing.assert_allclose(end_state(suite, index, "compact"), recorded, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(ASSETS not in os.environ, reason="LIBERO's meshes are not installed")
def test_installed_meshes_move_as_recorded() -> None:
    suite, index = TASKS[-1]
    recorded = json.loads(RECORDED.read_text())[f"{suite}/{index}"]
    np.testing.assert_allclose(end_state(suite, index, None), recorded, rtol=0, atol=1e-9)


@pytest.mark.parametrize("action", [np.full(7, np.nan), np.zeros(6), np.zeros((1, 7))], ids=["nan", "6", "(1, 7)"])
def test_rejects_invalid_action(bowl: LiberoSimulator, action: NDArray[np.float64]) -> None:
    with refused("invalid_action", bowl.task.suite):
        bowl.step(action)


def test_unknown_camera_error_lists_cameras() -> None:
    made = LiberoSimulator(suite_tasks("libero_spatial")[0], simulator(camera_name_mapping={"front": "image"}))
    made.reset(0, 0)
    with refused("unknown_camera", "'front'", "robot0_eye_in_hand"):
        made.observe()
    made.close()


def test_state_rotation_equals_quaternion() -> None:
    quaternions = Rotation.random(50, random_state=0).as_quat()
    quaternions *= np.where(np.arange(50) % 2, 1, -1)[:, None]
    for quaternion in [*quaternions, np.array([0, 0, 0, 1.0]), np.array([0, 0, 0, -1.0])]:
        seen = {"robot0_eef_pos": np.zeros(3), "robot0_eef_quat": quaternion, "robot0_gripper_qpos": np.zeros(2)}
        turn = robot_state(seen)[3:6].astype(np.float64)
        expected = Rotation.from_quat(quaternion).as_matrix()
        assert np.allclose(Rotation.from_rotvec(turn).as_matrix(), expected, atol=1e-6)
        length = np.linalg.norm(turn)
        assert length <= 2 * np.pi + 1e-6 and (length > np.pi) == (quaternion[3] < 0 and quaternion[3] != -1.0)


ALL = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def trajectory(made: LiberoSimulator, plain: bool) -> list[list[NDArray[np.float64]]]:
    """Return the integration state, positions, contacts and sensor values after each action."""
    made.reset(1, 5)
    if plain:
        restore(made._environment)
    sim, seen = made._environment.sim, []
    model, data = sim.model._model, sim.data._data
    rng = np.random.default_rng(0)
    for number in range(12):
        action = np.append(rng.uniform(-1, 1, 6), 1 if number % 2 else -1)
        action[2] = -1.0  # down, onto what is there
        if plain:
            made.observed, *_ = made._environment.step(action)
        else:
            made.step(action)
        state = np.empty(mujoco.mj_stateSize(model, ALL))
        mujoco.mj_getState(model, data, state, ALL)
        derived = (data.ctrl, data.xpos, data.geom_xpos, data.qacc, data.qfrc_constraint)
        derived += (data.sensordata, data.contact.dist)
        sensed = [np.ravel(made.observed[name]) for name in sorted(made.observed)]
        seen.append([state, *(np.array(each) for each in derived), *sensed])
    return seen


@pytest.mark.parametrize(("suite", "index"), TASKS)
def test_faster_steps_are_bit_identical_to_robosuite(suite: str, index: int) -> None:
    made = LiberoSimulator(suite_tasks(suite)[index], simulator())
    for ours, theirs in zip(trajectory(made, plain=False), trajectory(made, plain=True), strict=True):
        assert len(ours) == len(theirs)
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    made.close()


def test_patched_robosuite_methods_are_restored() -> None:
    made = LiberoSimulator(suite_tasks("libero_spatial")[0], simulator())
    made.reset(0, 0)
    sim = made._environment.sim
    with pytest.raises(ZeroDivisionError), one_pass(sim):
        raise ZeroDivisionError
    assert "step" not in vars(sim) and "forward" not in vars(sim)
    sim.model._model.opt.integrator = mujoco.mjtIntegrator.mjINT_RK4
    with one_pass(sim):
        assert "step" not in vars(sim)
    made.close()


def test_first_steps_compile_only_once(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    taken = []

    def steps(failing):
        taken.append(failing)
        if failing:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_once(lambda: steps(failing=True))
    compile_once(lambda: steps(failing=False))
    compile_once(lambda: steps(failing=False))
    assert taken == [True, False]
