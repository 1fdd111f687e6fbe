"""Writes images/libero-perturbations.png: what each perturbation looks like. python -m docs.perturbation_sheet"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import suite_tasks

FILE = Path(__file__).with_name("images") / "libero-perturbations.png"
NAMES = ("camera", "light", "texture", "layout", "distractors", "robot")
ROWS = (("image", 0.5), ("image", 1.0), ("wrist_image", 1.0))
SIDE, LABEL, SEED = 144, 16, 1004


def main() -> None:
    settings = SimulatorSettings(resolution=SIDE, assets="compact", num_steps_wait=10)
    simulator = LiberoSimulator(suite_tasks("libero_spatial")[0], settings)
    sheet = Image.new("RGB", (SIDE * (1 + len(NAMES)), (SIDE + LABEL) * len(ROWS)), "white")
    for column, name in enumerate(("", *NAMES)):
        for row, (camera, strength) in enumerate(ROWS):
            simulator.reset(0, SEED, Perturbation(name, strength) if name else None)
            image = simulator.observe().images[f"observation.images.{camera}"]
            at = (column * SIDE, row * (SIDE + LABEL))
            ImageDraw.Draw(sheet).text((at[0] + 4, at[1] + 2), f"{name} {strength:g}" if name else "none", "black")
            sheet.paste(Image.fromarray(np.asarray(image)), (at[0], at[1] + LABEL))
    simulator.close()
    sheet.quantize(256, kmeans=1).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
