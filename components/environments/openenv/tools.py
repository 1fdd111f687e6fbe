"""Episodes on an OpenEnv server that offers tools: its MCP tools are the policy's, and calls are steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from armature.components.contracts.episodes import ChatAnswer, ChatRequest, EarlierMessage, Observation, Outcome
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolCall
from armature.components.environments.openenv.messages import read_image
from armature.components.environments.openenv.session import OpenEnvEpisode, malformed
from armature.components.environments.tools.tool import MOST_CHARACTERS, MOST_PARTS


class OpenEnvToolEpisode(OpenEnvEpisode):
    """An episode whose policy is offered the server's tools.

    The calls of an answer are steps, in their order, and their results are messages of the role tool. If there are no
    calls, or if one cannot be parsed, the answer is an action, as on servers without tools.
    """

    async def reset(self) -> Observation:
        """Open a session, ask for the server's tools, and return the first request.

        Raises:
            RolloutFailed: as `OpenEnvEpisode.reset`, or the server offers no tools (`environment_error`).
        """
        first = await super().reset()
        fields, _, _ = self._fields(*await self._request("step", {"type": "list_tools"}))
        listed = fields.get("tools")
        if not isinstance(listed, list) or not listed:
            raise RolloutFailed("environment_error", "the server offers no tools: leave environment.args.own_tools out")
        self._tools = tuple(_schema(tool) for tool in listed)
        prompt = self._settings.system_prompt
        self._messages = [EarlierMessage("system", (prompt,))] if prompt else []
        return self._shown(first)

    async def answer(self, answer: ChatAnswer) -> Outcome:
        """Send the calls of an answer, or the action that it contains, and return the outcome.

        Raises:
            RolloutFailed: as `OpenEnvEpisode.step`.
        """
        if answer.refusal:
            return self._invalid()
        self._messages.append(EarlierMessage("assistant", (answer.text,)))
        if not answer.calls:
            outcome = await self.step(answer.text)
            if outcome.observation is None:
                return outcome
            return Outcome(self._shown(outcome.observation), outcome.reward_parts)
        rewards = []
        for call in answer.calls:
            content, done, reward = await self._call(call)
            self._messages.append(EarlierMessage("tool", content, call.name))
            rewards += [] if reward is None else [reward]
            if done:
                break
        self._rewarded = self._rewarded or bool(rewards)
        if done and not self._rewarded:
            raise RolloutFailed("bad_reward", "the episode is over and the server gave no reward in it")
        return Outcome(None if done else self._request_of(content), {"reward": sum(rewards)} if rewards else {})

    async def _call(self, call: ToolCall) -> tuple[tuple[str | EncodedImage, ...], bool, float | None]:
        """Return the result of a call, True if the episode is over, and the reward or None."""
        fields = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        kind, data = await self._request("step", fields)
        if kind == "error" and data.get("code") == "VALIDATION_ERROR":
            return (f"Error: {data.get('message')!s:.1000}",), False, None
        observation, done, reward = self._fields(kind, data)
        error = observation.get("error")
        if isinstance(error, Mapping):
            return (f"Error: {error.get('message')!s:.1000}",), done, reward
        return _content(observation.get("result", observation)), done, reward

    def _shown(self, observation: Observation) -> Observation:
        self._messages.append(EarlierMessage("user", observation.content))
        return self._request_of(observation.content)

    def _request_of(self, content: tuple[str | EncodedImage, ...]) -> Observation:
        return Observation(content, request=ChatRequest(tuple(self._messages), self._tools))


def _schema(tool: Any) -> Mapping[str, Any]:
    """Return the JSON schema of one of the server's tools, in the form of chat templates."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise malformed(f"{str(tool)[:200]!r} is not a tool with a name")
    parameters = tool.get("input_schema")
    described = {"name": tool["name"], "description": str(tool.get("description") or "")}
    described["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def _content(result: Any) -> tuple[str | EncodedImage, ...]:
    """Return the texts and images of a result: the parts of an MCP result, or any other value as JSON.

    Raises:
        RolloutFailed: an image cannot be read (`bad_image`), or the result is too large to be shown
            (`environment_error`).
    """
    listed = result.get("content") if isinstance(result, Mapping) else None
    parts = listed if isinstance(listed, list) and all(isinstance(part, dict) for part in listed) else [result]
    content: list[str | EncodedImage] = []
    for part in parts:
        if part is not result and part.get("type") == "image":
            content.append(read_image("result", part.get("data")))
        elif part is not result and isinstance(part.get("text"), str):
            content.append(part["text"])
        else:
            content.append(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False))
    size = sum(len(part) for part in content if isinstance(part, str))
    if len(content) > MOST_PARTS or size > MOST_CHARACTERS:
        what = f"{len(content)} parts with {size} characters; at most {MOST_PARTS} with {MOST_CHARACTERS} are shown"
        raise RolloutFailed("environment_error", f"a tool's result has {what}")
    return tuple(content) or ("",)
