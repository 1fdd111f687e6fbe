"""Learning-rate schedules against values computed by hand."""

from __future__ import annotations

import numpy as np

from armature.components.training.schedule import learning_rate


def test_learning_rate() -> None:
    linear = [learning_rate(k, peak=1.0, warmup=2, steps=6, scheduler="linear") for k in range(1, 8)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = [learning_rate(k, peak=1.0, warmup=0, steps=4, scheduler="cosine") for k in (1, 3, 5)]
    np.testing.assert_allclose(cosine, [1.0, 0.5, 0.0], atol=1e-12)
