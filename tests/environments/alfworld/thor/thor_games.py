"""Hand-written games for AI2-THOR, a stand-in for the player program, and an environment that uses it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armature.components.contracts.episodes import Task
from armature.components.environments.alfworld.thor.environment import AlfworldThor, AlfworldThorSettings

STAND_IN = Path(__file__).parent / "thor_player"
SPECIAL = {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"}

FRIDGE = "Fridge|+00.97|+00.00|+01.25"
COUNTER = "CounterTop|+00.93|+00.95|-02.05"
OTHER_COUNTER = "CounterTop|-01.24|+00.97|-00.64"


def settings(**changes: Any) -> AlfworldThorSettings:
    prompt = {
        "first": "{observation}\nAdmissible: {actions}",
        "later": "Task: {task}. {history} Now: {observation}\nAdmissible: {actions}",
        "past": "[{step}: {observation} -> {action}]",
        "past_separator": " ",
        "action": "'{action}'",
        "action_separator": ", ",
        "thinking": False,
        "answer": "<think>I know the way.</think><action>{action}</action>",
    }
    games = {"source": "generated", "kinds": ["pick_and_place_simple"], "rooms": ["Kitchen"]}
    values = {
        "games": {**games, "most_instances": 1, "most_receptacles": 8},
        "heldout_source": "valid_unseen",
        "prompt": prompt,
        "max_turns": 20,
        "reward": {"name": "terminal", "won_weight": 10.0},
    }
    return AlfworldThorSettings.model_validate(values | changes)


def environment(processes: int = 1, **changes: Any) -> AlfworldThor:
    return AlfworldThor(settings(**changes), train_tasks=1, heldout_tasks=1, seed=0, processes=processes)


def stand_in(folder: Path, patch: pytest.MonkeyPatch, program: Path = STAND_IN) -> None:
    """Set `program` as the player, with its own home folder and without display and GPU."""
    script = folder / "player"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -B {shlex.quote(str(program))} "$@"\n')
    script.chmod(0o755)
    patch.setenv("ARMATURE_THOR_PLAYER", str(script))
    patch.setenv("HOME", str(folder))
    patch.setenv("ALFWORLD_DATA", str(folder))
    for name in ("DISPLAY", "CUDA_VISIBLE_DEVICES"):
        patch.delenv(name, raising=False)


def pddl(object_id: str) -> str:
    for character, name in SPECIAL.items():
        object_id = object_id.replace(character, name)
    return object_id


@dataclass
class Kitchen:
    """A scene with objects. Each of `things`, by id, lies in the receptacle nearest to the position in its id."""

    scene: int
    receptacles: Sequence[str]
    things: Sequence[str]
    start: tuple[float, float] = (0.0, 0.0)

    def task(
        self, kind: str, target: str, parent: str = "", toggle: str = "", plan: Sequence[str] = (), **scene: Any
    ) -> Task:
        declared = [f"{pddl(thing)} - object" for thing in self.things]
        declared += [f"{pddl(place)} - receptacle" for place in self.receptacles]
        poses = [
            {
                "objectName": thing.replace("|", "_"),
                "position": dict(zip("xyz", map(float, thing.split("|")[1:4]), strict=True)),
                "rotation": {"x": 0.0, "y": 0.0, "z": 0.0},
            }
            for thing in self.things
        ]
        targets = {"object_target": target, "parent_target": parent, "toggle_target": toggle, "mrecep_target": ""}
        start = {"action": "TeleportFull", "x": self.start[0], "y": 0.9, "z": self.start[1], "rotation": 45}
        start["horizon"] = 30
        described: Mapping[str, Any] = {
            "scene_num": self.scene,
            "object_poses": poses,
            "object_toggles": [],
            "dirty_and_empty": False,
            "init_action": {**start, "rotateOnTeleport": True},
        }
        payload = {
            "game": "by-hand",
            "kind": kind,
            "scene": self.scene,
            "source": "train",
            "problem": "(define (problem p)\n(:objects\n " + "\n ".join(declared) + ")\n(:init))",
            "goal": f"put a {target.lower()} somewhere",
            "plan": list(plan),
            "trajectory": {
                "task_type": kind,
                "pddl_params": {**targets, "object_sliced": False},
                "scene": {**described, **scene},
            },
        }
        return Task("by-hand", "train", payload)


def alfworlds_names(ids: Sequence[str]) -> dict[str, str]:
    """Return the names that alfworld gives to the things with these ids in a text game."""
    from alfworld.agents.utils.misc import Demangler

    infos = {index: SimpleNamespace(id=pddl(object_id).lower()) for index, object_id in enumerate(ids)}
    demangler = Demangler(game_infos=infos)
    return {object_id: demangler.demangle_alfred_name(pddl(object_id).lower()) for object_id in ids}
