"""The interface of verifiers 0.4: tasksets, harnesses and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.verifiers.source import Row

VERSION = version("verifiers")
if tuple(int(part) for part in VERSION.split(".")[:2]) < (0, 4):
    raise ConfigurationError(
        f"verifiers {VERSION} has no complete interface v1",
        code="verifiers_version_unsupported",
        remedy='pip install "verifiers>=0.4", or use interface = "legacy"',
    )

import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # noqa: E402

ENDLESS = 10_000
"""Number of tasks that are taken from a taskset without an end."""


class V1Source:
    """A taskset that one agent plays. The agent's harness reaches our endpoint through verifiers' interception server.

    The harness is `null`, a plain chat loop in a child process, unless `args` name another. So v1 needs one process
    per episode.
    """

    def __init__(self, id: str, args: Mapping[str, Any], max_turns: int) -> None:
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "network_notice": False}
        self._config = resolve_env_config(
            {
                **args,
                "taskset": {**args.get("taskset", {}), "id": id},
                "agent": {**agent, **args.get("agent", {}), "max_turns": max_turns},
            }
        )
        self.max_turns = max_turns

    def rows(self) -> tuple[Sequence[Row], Sequence[Row] | None]:
        taskset = load_environment(self._config).taskset
        tasks = list(taskset if taskset.bounded else islice(taskset, ENDLESS))
        return [Row(task, task.hash) for task in tasks], None

    async def play(self, row: Row, base_url: str, key: str) -> dict[str, float]:
        headers = {"X-API-Key": key}  # a bearer token would be read from a variable of this process
        client = vf.EvalClientConfig(base_url=base_url, headers=headers, api_key_var="VERIFIERS_POLICY_KEY")
        context = vf.ModelContext(model="policy", client=client)
        environment = load_environment(self._config)
        async with environment.serving():
            episode = await environment.run_episode(row.value, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1:
            messages = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"the episode of {len(episode.traces)} agents failed: {messages}")
        (trace,) = episode.traces
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **parts, "reward": trace.reward}
