"""LIBERO's simulator: steps, resets and images against its own environment, and what drawing costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import load_initial_states, suite_tasks
from benchmarks.table import Row, alternate

CHUNK, ROUNDS, DRAWN, STEPPED, RESETS = 10, 3, 4, 60, 4
SIDES = (64, 128, 256)


def settings(**changes: Any) -> SimulatorSettings:
    values: dict[str, Any] = {
        "camera_name_mapping": {"agentview": "image", "robot0_eye_in_hand": "image2"},
        "resolution": 128,
        "control_freq": 20,
        "num_steps_wait": 0,
        "reflections": True,
        "offscreen_samples": 4,
        "assets": None if "ARMATURE_LIBERO_ASSETS" in os.environ else "compact",
        "trusted_initial_states": (),
    }
    return SimulatorSettings.model_validate(values | changes)


def measure() -> list[Row]:
    scene = "LIBERO's meshes" if settings().assets is None else "compact assets"
    return [_chunks(scene), _resets(scene), *(_drawing(side, scene) for side in SIDES), _processes()]


def _chunks(scene: str) -> Row:
    """Compare ten simulator steps with one observation after them. A policy that executes ten actions per chunk sees
    only one of ten moments, but LIBERO renders all ten."""
    task = suite_tasks("libero_spatial")[0]
    ours = LiberoSimulator(task, settings())
    ours.reset(0, 0)
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    theirs = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=128, camera_widths=128)
    theirs.seed(0)
    theirs.reset()
    still = np.array([0, 0, 0, 0, 0, 0, -1.0])

    def ours_chunk() -> None:
        for _ in range(CHUNK):
            ours.step(still)
        ours.observe()

    def their_chunk() -> None:
        theirs.sim._render_context_offscreen.gl_ctx.make_current()  # it draws into whichever is current
        for _ in range(CHUNK):
            theirs.step(still)

    spent = alternate(ROUNDS, lambda: CHUNK / _core(ours_chunk), lambda: CHUNK / _core(their_chunk))
    ours.close()
    theirs.close()
    note = f"chunks of {CHUNK} actions, two cameras of 128 pixels, the same images at a chunk's end, {scene}"
    return Row(
        "simulated steps",
        spent.ours,
        spent.baseline,
        "LIBERO's environment",
        "/s of a core",
        "higher",
        note,
        spent.spread,
    )


def _resets(scene: str) -> Row:
    """Compare resets to a stored initial state, including the first images."""
    task = suite_tasks("libero_spatial")[0]
    ours, states = LiberoSimulator(task, settings()), load_initial_states(task)
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    theirs = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=128, camera_widths=128)

    def our_resets() -> None:
        for state in range(RESETS):
            ours.reset(state, 0)
            ours.observe()

    def their_resets() -> None:
        for state in range(RESETS):
            theirs.sim._render_context_offscreen.gl_ctx.make_current()
            theirs.seed(0)
            theirs.reset()
            theirs.set_init_state(states[state])

    spent = alternate(ROUNDS, lambda: 1e3 * _core(our_resets) / RESETS, lambda: 1e3 * _core(their_resets) / RESETS)
    ours.close()
    theirs.close()
    note = f"two cameras of 128 pixels, {scene}"
    return Row(
        "a reset with its images",
        spent.ours,
        spent.baseline,
        "LIBERO's environment",
        "ms of a core",
        "lower",
        note,
        spent.spread,
    )


def _drawing(side: int, scene: str) -> Row:
    """Compare rendering one image of each of two cameras without and with reflections."""
    task = suite_tasks("libero_spatial")[0]
    made = [LiberoSimulator(task, settings(resolution=side, reflections=mirrors)) for mirrors in (False, True)]
    for simulator in made:
        simulator.reset(0, 0)
        simulator.observe()

    def draw(simulator: LiberoSimulator) -> float:
        return 1e3 * _core(lambda: [simulator.observe() for _ in range(DRAWN)]) / DRAWN

    spent = alternate(ROUNDS, lambda: draw(made[0]), lambda: draw(made[1]))
    for simulator in made:
        simulator.close()
    what = f"two images of {side} pixels without reflections"
    return Row(what, spent.ours, spent.baseline, "with them", "ms of a core", "lower", scene, spent.spread)


def _processes() -> Row:
    """Compare two simulator processes with one process, in steps per second."""
    task = suite_tasks("libero_spatial")[0]
    still = np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (STEPPED, 1))
    with (
        SimulatorProcess(settings(resolution=64), 600.0) as first,
        SimulatorProcess(settings(resolution=64), 600.0) as second,
    ):
        for process in (first, second):
            process.reset(task, 0, 0)
        spent = alternate(
            ROUNDS,
            lambda: 2 * STEPPED / _together([first, second], still),
            lambda: STEPPED / _together([first], still),
        )
    note = f"chunks of {STEPPED} actions with an image at the end, {os.cpu_count()} cores, wall time"
    return Row("steps of two processes", spent.ours, spent.baseline, "one process", "/s", "higher", note, spent.spread)


def _together(processes: list[SimulatorProcess], actions: Any) -> float:
    threads = [threading.Thread(target=process.step, args=(actions,)) for process in processes]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _core(work: Callable[[], object]) -> float:
    """Return the CPU seconds that `work` takes, including the threads of the software renderer."""
    began = time.process_time()
    work()
    return time.process_time() - began
