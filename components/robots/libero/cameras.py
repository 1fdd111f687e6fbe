"""Images of a simulation, drawn when they are asked for and not at every step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    import mujoco

MOST_GEOMETRIES = 1000
"""Of a scene, as robosuite has it."""


class Cameras:
    """Fixed cameras of one simulator, in a GL context of their own.

    Several may live in a process: each makes its context the current one before it uses or frees anything in it.
    Images are those of robosuite's offscreen renderer, to the pixel, when reflections are on and the number of
    samples is MuJoCo's.
    """

    def __init__(self, names: Sequence[str], resolution: int, reflections: bool, samples: int) -> None:
        import mujoco

        self._names, self._side, self._reflections, self._samples = tuple(names), resolution, reflections, samples
        self._context: Any = gl_context(resolution)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision geometry
        self._moved = mujoco.MjvPerturb()
        self._moved.active, self._moved.select, self._moved.skinselect = 0, 0, -1
        self._drawn: mujoco.MjrContext | None = None
        self._looks: mujoco.MjModel | None = None

    def show(self, model: mujoco.MjModel, looks: mujoco.MjModel | None = None) -> None:
        """Draw this model from now on.

        Args:
            looks: one with the same meshes and textures, which are not loaded again if those that are drawn with have
                been of this one; None: they are this model's own.

        Raises:
            ConfigurationError: it has no camera of a name.
        """
        import mujoco

        cameras = [model.camera(number).name for number in range(model.ncam)]
        if unknown := [name for name in self._names if name not in cameras]:
            raise ConfigurationError(
                f"LIBERO has no camera {unknown[0]!r}",
                code="unknown_camera",
                where="simulator.camera_name_mapping",
                remedy=f"known: {', '.join(cameras)}",
            )
        model.vis.quality.offsamples = self._samples
        model.vis.global_.offwidth = max(self._side, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(self._side, model.vis.global_.offheight)
        self._model = model
        self._numbers = {name: cameras.index(name) for name in self._names}
        if looks is not None and looks is self._looks:
            return
        self._free()
        self._looks = looks
        self._scene = mujoco.MjvScene(model, MOST_GEOMETRIES)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = self._reflections
        self._drawn = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._drawn)

    def draw(self, data: mujoco.MjData) -> dict[str, NDArray[np.uint8]]:
        """Camera to RGB (side, side, 3), turned by half a circle against MuJoCo's, as LIBERO's datasets are."""
        import mujoco

        self._context.make_current()
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view = mujoco.MjrRect(0, 0, self._side, self._side)
        images = {}
        for name, number in self._numbers.items():
            camera.fixedcamid = number
            mujoco.mjv_updateScene(
                self._model, data, self._options, self._moved, camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(view, self._scene, self._drawn)
            pixels = np.empty((self._side, self._side, 3), np.uint8)
            mujoco.mjr_readPixels(pixels, None, view, self._drawn)
            images[name] = np.ascontiguousarray(pixels[::-1, ::-1])
        return images

    def close(self) -> None:
        self._free()
        self._context.free()

    def _free(self) -> None:
        self._context.make_current()
        if self._drawn is not None:
            self._drawn.free()
            self._drawn = None


def gl_context(side: int) -> Any:
    """A context of the kind that MUJOCO_GL names.

    Raises:
        ConfigurationError: it names none, or there is no driver.
    """
    kind = os.environ.get("MUJOCO_GL", "egl").lower()
    if kind not in ("egl", "osmesa", "glfw"):
        raise ConfigurationError(
            "not a way to render", code="unknown_renderer", where="MUJOCO_GL", remedy="set it to egl, osmesa or glfw"
        )
    try:
        return import_module(f"mujoco.{kind}").GLContext(side, side)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ConfigurationError(
            f"rendering is unavailable: {error}",
            code="rendering_unavailable",
            where=f"MUJOCO_GL={kind}",
            remedy="set it to egl, osmesa or glfw, and install that driver (libegl1 and libgl1-mesa-dri)",
        ) from error
