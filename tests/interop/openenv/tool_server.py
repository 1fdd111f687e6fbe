"""A server of OpenEnv's with MCP tools: `look` shows a color, `name` ends the episode; a wrong name has no reward."""

import argparse
import io

import uvicorn
from fastmcp import FastMCP
from fastmcp.utilities.types import Image
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from PIL import Image as Pillow

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class ToolEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("colors")
        self._answer, self._state = "red", State()

        @server.tool
        def look(side: int):
            """Look at the color."""
            image = io.BytesIO()
            Pillow.new("RGB", (side, side), COLORS[self._answer]).save(image, "PNG")
            return ["Here it is.", Image(data=image.getvalue(), format="png")]

        @server.tool
        def name(color: str) -> str:
            """Name the color."""
            return "right" if color == self._answer else "wrong"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._answer, self._state = list(COLORS)[seed // 2 % 3], State(episode_id=episode_id)
        return Observation(metadata={"game": seed})

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(seen, CallToolObservation) and action.tool_name == "name" and seen.error is None:
            seen.done, seen.reward = True, float(action.arguments["color"] == self._answer)
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("there are only tools")

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    app = create_app(ToolEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
