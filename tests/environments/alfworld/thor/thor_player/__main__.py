"""The stand-in player: `python thor_player -screen-width 300 -screen-height 300`, with variables of ai2thor."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from protocol import Pipes, Posts
from signatures import refusal
from world import Refused, World

BACKGROUND = (40, 44, 52)


def color_of(index: int) -> tuple[int, int, int]:
    return (11 + 37 * index) % 256, (53 + 91 * index) % 256, (7 + 29 * index) % 256


class Screen:
    """A screen with a band of color for each visible thing, the first at the top; lower bands are shorter."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.segmented = False

    def draw(self, world: World) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Return the frame, the segmentation image, and each thing's color."""
        colors = {object_id: color_of(index) for index, object_id in enumerate(sorted(world.things))}
        frame = np.full((self.height, self.width, 3), BACKGROUND, np.uint8)
        ids = np.zeros_like(frame)
        seen = world.in_sight()
        band = self.height // max(12, len(seen))
        for position, object_id in enumerate(seen):
            place = slice(position * band, (position + 1) * band), slice(0, self.width - 2 * position - 1)
            frame[place] = ids[place] = colors[object_id]
        return frame, ids, [{"name": name, "color": list(color)} for name, color in colors.items()]


def metadata(world: World, screen: Screen, sequence: int, colors: Any, **result: Any) -> dict[str, Any]:
    seen = set(world.in_sight())
    held = world.held and {"objectId": world.held, "objectType": world.things[world.held]["objectType"]}
    agent = {
        "agentId": 0,
        "screenWidth": screen.width,
        "screenHeight": screen.height,
        "sceneName": world.scene,
        "objects": [thing | {"visible": key in seen} for key, thing in world.things.items()],
        "colors": colors,
        "thirdPartyCameras": [],
        "inventoryObjects": [held] if held else [],
        "agent": {
            "position": world.position,
            "rotation": {"x": 0.0, "y": world.rotation, "z": 0.0},
            "cameraHorizon": world.horizon,
        },
        **result,
    }
    return {"agents": [agent], "thirdPartyCameras": [], "activeAgentId": 0, "sequenceId": sequence}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-screen-width", type=int, default=300)
    parser.add_argument("-screen-height", type=int, default=300)
    arguments, _ = parser.parse_known_args()
    by_pipes = os.environ["AI2THOR_SERVER_TYPE"] == "FIFO"
    release = "5.0" if by_pipes else "2.1"
    # The real player 5.0 ignores the size on its command line when it draws off-screen.
    size = (300, 300) if by_pipes else (arguments.screen_width, arguments.screen_height)
    world, screen, line = World(release), Screen(*size), Pipes() if by_pipes else Posts()
    action: dict[str, Any] = {"action": "Initialize", "sequenceId": 0}
    while True:
        code, message = refusal(action, release)
        result = None
        if not message:
            try:
                result = world.act(action)
            except Refused as error:
                message = str(error)
        if action["action"] == "ChangeResolution":
            screen.width, screen.height = int(action["x"]), int(action["y"])
        screen.segmented |= bool(action.get("renderInstanceSegmentation") or action.get("renderObjectImage"))
        frame, ids, colors = screen.draw(world)
        answer = {"lastAction": action["action"], "lastActionSuccess": not message, "actionReturn": result}
        state = metadata(world, screen, action["sequenceId"], colors, **answer, errorCode=code, errorMessage=message)
        line.send(state, frame, ids if screen.segmented else None)
        action = line.receive()


if __name__ == "__main__":
    main()
