"""Which answers of a step each update has. Torch-free."""

from __future__ import annotations

from math import ceil

import numpy as np

from armature.components.vla_rl.settings import RobotRLTrainerSettings


def update_rows(count: int, settings: RobotRLTrainerSettings, number: int) -> list[list[int]]:
    """The answers of each update of step `number`, as many in each as evenness allows: AdamW's steps are of one size,
    and one made of what is left over would be noise."""
    parts = ceil(count / (settings.samples_per_update or max(count, 1)))
    found = []
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, number, epoch)).permutation(count).tolist()
        found += [order[part::parts] for part in range(parts)]
    return found
