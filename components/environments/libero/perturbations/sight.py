"""What is seen, changed: cameras, lights, textures. A reset has a new model, so nothing has to be undone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from armature.components.environments.libero.perturbations.scene import PerturbedScene

ORBIT = np.radians([10.0, 20.0, 5.0])
"""Around the camera's own axes: to the right, up, and backward."""
DISTANCE, FIELD = 0.15, 0.15
AHEAD, AHEAD_ON_ROBOT = 1.0, 0.1
"""Meters from a camera to what it looks at."""
COLLISION = 0
"""The group of geoms that are not drawn."""
MOVE, TILT, BRIGHTNESS, TINT, AMBIENT = 1.5, np.radians(30.0), 2.5, 0.3, 0.3


def perturb_camera(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Turned around the point that they look at, nearer or farther, with another field of view."""
    import mujoco

    model = scene.model
    for camera in range(model.ncam):
        drawn = strength * rng.uniform(-1, 1, 5)
        ahead = AHEAD if model.cam_bodyid[camera] == 0 else AHEAD_ON_ROBOT
        turn, turned, axes = np.zeros(4), np.zeros(4), np.zeros(9)
        mujoco.mju_euler2Quat(turn, ORBIT * drawn[:3], "xyz")
        mujoco.mju_mulQuat(turned, model.cam_quat[camera], turn)
        mujoco.mju_quat2Mat(axes, model.cam_quat[camera])
        focus = model.cam_pos[camera] - ahead * axes[2::3]  # a camera looks along its negative z
        mujoco.mju_quat2Mat(axes, turned)
        model.cam_pos[camera] = focus + ahead * (1 + DISTANCE * drawn[3]) * axes[2::3]
        model.cam_quat[camera] = turned
        model.cam_fovy[camera] *= 1 + FIELD * drawn[4]


def perturb_light(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Moved, turned, brighter or darker, of another color; the ambient light of the whole scene changes, too."""
    import mujoco

    model = scene.model
    for light in range(model.nlight):
        drawn, turn, axis = strength * rng.uniform(-1, 1, 8), np.zeros(4), np.zeros(3)
        model.light_pos[light, :2] += MOVE * drawn[:2]
        mujoco.mju_euler2Quat(turn, TILT * np.array([drawn[2], drawn[3], 0.0]), "xyz")
        mujoco.mju_rotVecQuat(axis, model.light_dir[light], turn)
        model.light_dir[light] = axis
        model.light_diffuse[light] *= BRIGHTNESS ** drawn[4] * (1 + TINT * drawn[5:])
    whole = model.vis.headlight
    drawn = strength * rng.uniform(-1, 1, 2)
    whole.diffuse[:] *= BRIGHTNESS ** drawn[0]
    whole.ambient[:] += AMBIENT * abs(drawn[1])


def perturb_texture(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Scenery fades to random patterns; what has no texture, to random colors. What objects share with it stays."""
    import mujoco

    model = scene.model
    scenery = scene.scenery & (model.geom_group != COLLISION)
    used = {int(one) for one in model.geom_matid[scenery]} - {-1}
    materials = sorted(used - {int(one) for one in model.geom_matid[~scenery]})
    skies = np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    textures = {int(one) for one in skies}
    for material in materials:
        images = {int(one) for one in model.mat_texid[material]} - {-1}
        textures |= images
        if not images:
            _fade(model.mat_rgba[material], strength, rng)
    for geom in np.flatnonzero(scenery & (model.geom_matid == -1)):
        _fade(model.geom_rgba[geom], strength, rng)
    kept = {int(one) for material in set(range(model.nmat)) - set(materials) for one in model.mat_texid[material]}
    for texture in sorted(textures - kept):
        height, width, channels = (int(of[texture]) for of in (model.tex_height, model.tex_width, model.tex_nchannel))
        start = int(model.tex_adr[texture])
        image = model.tex_data[start : start + height * width * channels].reshape(height, width, channels)
        shown = min(3, channels)
        faded = (1 - strength) * image[..., :shown] + strength * _pattern(height, width, rng)[..., :shown]
        image[..., :shown] = np.rint(faded)


def _fade(rgba: NDArray[np.float32], strength: float, rng: np.random.Generator) -> None:
    rgba[:3] = (1 - strength) * rgba[:3] + strength * rng.uniform(0, 1, 3)


def _pattern(height: int, width: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(height, width, 3) from 0 to 255: two colors in checks, stripes or blots."""
    colors = rng.uniform(0, 255, (2, 3))
    kind, size = rng.integers(3), max(1, width // int(rng.integers(2, 9)))
    blots = rng.integers(0, 2, (height // size + 1, width // size + 1))
    down, right = np.mgrid[:height, :width] // size
    chosen = [(down + right) % 2, right % 2, blots[down, right]][kind]
    return np.asarray(colors[chosen])
