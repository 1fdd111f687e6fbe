"""LIBERO-PRO's 16 suites: LIBERO's tasks with swapped or replaced objects, other instructions or other goals.

Their files come from the wheel that `armature setup --libero-meshes` downloads. Nothing in the wheel is run: new
objects are variants of LIBERO's, with another file of shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.libero.package import ASSETS

ProSuite = Literal[
    "libero_spatial_swap", "libero_spatial_object", "libero_spatial_lan", "libero_spatial_task",
    "libero_object_swap", "libero_object_object", "libero_object_lan", "libero_object_task",
    "libero_goal_swap", "libero_goal_object", "libero_goal_lan", "libero_goal_task",
    "libero_10_swap", "libero_10_object", "libero_10_lan", "libero_10_task",
]  # fmt: skip
PRO_SUITES: tuple[str, ...] = get_args(ProSuite)
KNOWN_FILES = Path(__file__).with_name("known_pro_files.json")

VARIANTS = {
    "black_bowl": "akita_black_bowl",
    "bigger_akita_black_bowl": "akita_black_bowl",
    "bigger_alphabet_soup": "alphabet_soup",
    "blue_ketchup": "alphabet_soup",
    "brown_rack": "wine_rack",
    "green_bbq_sauce": "bbq_sauce",
    "green_butter": "butter",
    "green_chocolate_pudding": "chocolate_pudding",
    "red_basket": "basket",
    "red_cream_cheese": "cream_cheese",
    "red_salad_dressing": "salad_dressing",
    "white_bottle": "wine_bottle",
    "yellow_cabinet": "wooden_cabinet",
    "yellow_milk": "alphabet_soup",
    "yellow_moka_pot": "moka_pot",
    "yellow_plate": "plate",
    "yellow_stove": "flat_stove",
    "yellow_tomato_sauce": "tomato_sauce",
}
"""LIBERO's object with the same joints, rotation and switches, by LIBERO-PRO's object."""


def base_suite(suite: str) -> str:
    """Return the suite that a suite of LIBERO-PRO varies, and other suites themselves.

    Example:
        >>> base_suite("libero_goal_swap")
        'libero_goal'
    """
    return suite.rsplit("_", 1)[0] if suite in PRO_SUITES else suite


def plain_name(name: str) -> str:
    """Return an object's or a place's name with LIBERO's category and without the object's number.

    Example:
        >>> plain_name("yellow_stove_1_cook_region")
        'flat_stove_cook_region'
    """
    category, *part = re.split(r"_\d+", name, maxsplit=1)
    return "".join([VARIANTS.get(category, category), *part])


def pro_folder() -> Path:
    """Return the folder with bddl_files and init_files of LIBERO-PRO.

    Raises:
        ConfigurationError: it is not beside the folder of assets.
    """
    folder = (
        Path(os.environ.get(ASSETS, "")).absolute().parent.parent / "libero/libero" if ASSETS in os.environ else None
    )
    if folder is None or not folder.is_dir():
        raise ConfigurationError(
            "the files of LIBERO-PRO are missing",
            code="assets_missing",
            where=ASSETS,
            remedy=f"run `armature setup --libero-meshes` and set {ASSETS} as it says",
        )
    return folder


@cache
def pro_language(suite: str, name: str) -> tuple[str, str]:
    """Return the instruction of a task and the SHA-256 digest of its file of initial states.

    Raises:
        DataError: the task's BDDL file is not the one that was checked.
    """
    path = pro_folder() / "bddl_files" / suite / f"{name}.bddl"
    data = path.read_bytes()
    bddl, states = json.loads(KNOWN_FILES.read_text())[f"{suite}/{name}"]
    if hashlib.sha256(data).hexdigest() != bddl:
        raise DataError(
            "the task's file is not LIBERO-PRO's",
            code="unknown_task_file",
            where=str(path),
            remedy="run `armature setup --libero-meshes` again",
        )
    words = re.search(r"\(:language ([^)]*)\)", data.decode())
    assert words is not None
    return words[1].strip().lower(), states


@cache
def register_variants() -> None:
    """Add LIBERO-PRO's objects to the imported libero package."""
    from libero.libero.envs import base_object

    for name, base in VARIANTS.items():
        parent = base_object.OBJECTS_DICT[base]
        base_object.register_object(_variant(name, parent))
        if base in base_object.VISUAL_CHANGE_OBJECTS_DICT:
            base_object.VISUAL_CHANGE_OBJECTS_DICT[name] = base_object.OBJECTS_DICT[name]


def _variant(category: str, parent: type) -> type:
    def __init__(self: object, name: str = category, obj_name: str = category, **arguments: object) -> None:
        parent.__init__(self, name, obj_name, **arguments)  # type: ignore[misc]

    return type(category.title().replace("_", ""), (parent,), {"__init__": __init__})
