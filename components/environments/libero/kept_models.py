"""What robosuite compiles again at every reset, compiled once, with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import mujoco

KEPT = 4
"""Compiled documents of a process: of the tasks that its simulators play. One takes up to some 100 MB."""


@dataclass
class Compiled:
    """model: what the last document was compiled to, never changed; None: there was no document yet."""

    model: mujoco.MjModel | None = None


@contextmanager
def kept_models() -> Iterator[Compiled]:
    """Inside, robosuite's simulations of a document that is known are made of a copy of its compiled model.

    A reset compiles a task's document each time, though it is always the same: what a seed decides is set in the
    model afterwards.
    """
    from robosuite.utils.binding_utils import MjSim

    own, found = vars(MjSim)["from_xml_string"], Compiled()

    def from_xml_string(kind: type[MjSim], xml: str) -> MjSim:
        found.model = _compiled(xml)
        return kind(copy.copy(found.model))

    MjSim.from_xml_string = classmethod(from_xml_string)
    try:
        yield found
    finally:
        MjSim.from_xml_string = own


@lru_cache(KEPT)
def _compiled(xml: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(xml)
