"""`ServerPool`: vLLM servers that answer every request once, with weights of a known version."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import httpx

from armature.components.contracts.errors import keep_secret
from armature.components.contracts.machine import Machine
from armature.components.inference.client import (
    OTHER_WEIGHTS,
    Completion,
    GenerationFailure,
    Message,
    Sampling,
    TransientError,
)
from armature.components.inference.command import (
    ServedAdapters,
    expert_layout,
    has_experts,
    placeholder_token_ids,
    read_config,
    sampled_token_ids,
    vocabulary,
)
from armature.components.inference.determinism import Repeatability
from armature.components.inference.direct_access import ServerAccess, SuspectServer, server_access
from armature.components.inference.lease import describe_run
from armature.components.inference.monitor import PoolContext, PoolMonitors
from armature.components.inference.own_servers import OwnServers
from armature.components.inference.probe import ProbeAnswer, SyncCheck, make_probe
from armature.components.inference.replica import Replica, reset_caches
from armature.components.inference.requests import AnswerLimits, PoolRequests
from armature.components.inference.routing import PoolStatistics, Router
from armature.components.inference.settings import ServerSettings
from armature.components.inference.sync import ServedWeights, sync_failure
from armature.components.inference.tool_calls import ToolFormat, read_tool_format
from armature.components.inference.weights import Publish
from armature.components.machine.network import socket_options
from armature.components.models.reserved_tokens import added_tokens

log = logging.getLogger(__name__)

OPEN: WeakSet[ServerPool] = WeakSet()
"""The pools of this process that answer requests."""


class ServerPool:
    """A pool of vLLM servers, used with `async with`.

    It starts `machine.servers.count` servers, on this machine or on `machine.cluster`, or joins the servers at
    `machine.servers.endpoints`. A request is answered exactly once or raises. If one server fails it, another tries, up
    to `MAX_ATTEMPTS` times. A server that dies or hangs is removed, restarted with the current weights, and added
    again.

    `sync` waits until no request is in flight, so every token of a completion has the same `policy_version`. With
    `in_flight_updates`, requests continue with the new weights, and `policy_version` is the version of the oldest
    token. All calls must come from the event loop that entered the pool.

    Args:
        weights: checkpoint folder that the servers start with, as policy version 0.
        log_folder: folder for one log file per server and start.
        forbidden_token_ids: ids that are never sampled; None: the placeholder ids in the checkpoint's config.json. The
            trainer must exclude the same ids from its softmax, because log-probs are normalized over the rest.
        load_on_join: load `weights` into joined servers at once. False: keep their weights until the first sync; the
            caller compares log-probs.
        adapters: `sync` loads LoRA adapters of this kind on top of `weights`, which the servers keep. A joined server
            must have been started with `weights`.
        in_flight_updates: let `sync` pause requests instead of waiting for them. It still waits for requests sent by
            direct access, for servers with adapters, and for servers without our plug-in.

    Raises:
        ConfigurationError: the servers cannot run with these `settings` on this `machine`, or the model has no experts
            to replay.
        DataError: `weights` is not a checkpoint.

    Example:
        Start a pool, ask it, and load new weights into its servers::

            async with ServerPool(checkpoint, settings, Machine(servers=2), logs) as pool:
                completion = await pool.complete(messages, sampling, seed=0)
                await pool.sync(new_checkpoint, version=1)
    """

    def __init__(
        self,
        weights: Path,
        settings: ServerSettings,
        machine: Machine,
        log_folder: Path,
        *,
        forbidden_token_ids: Sequence[int] | None = None,
        load_on_join: bool = True,
        adapters: ServedAdapters | None = None,
        in_flight_updates: bool = False,
    ) -> None:
        self.settings, self.machine, self.log_folder, self.adapters = settings, machine, log_folder, adapters
        if adapters is not None:
            adapters.check(machine)
        if forbidden_token_ids is None:
            forbidden_token_ids = placeholder_token_ids(weights)
        self.forbidden_token_ids = sampled_token_ids(weights, forbidden_token_ids)
        self.repeatability = Repeatability(settings, machine, self.forbidden_token_ids)
        self.statistics = PoolStatistics()
        sampled, prompt = vocabulary(weights)
        places = tuple(sorted({token.text for token in added_tokens(weights) if token.id in set(forbidden_token_ids)}))
        forbidden = frozenset(self.forbidden_token_ids)
        experts = expert_layout(weights) if settings.replay_experts else None
        self.limits = AnswerLimits(sampled, prompt, forbidden, settings.max_model_len, places, experts)
        images = settings.max_images_per_prompt > 0
        probe = make_probe(sampled, forbidden_token_ids, settings.max_model_len - 1, images)
        sync_check = SyncCheck(probe, settings, machine, has_experts(read_config(weights)))
        transfer = "adapter" if adapters is not None else machine.servers.weight_transfer
        self.weights = ServedWeights(
            weights, transfer, sync_check, load_on_join, adapters is not None, in_flight_updates and adapters is None
        )
        self._api_key = os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(32)
        keep_secret(self._api_key)
        self.lease = secrets.token_hex(16)
        self._own = OwnServers(weights, settings, machine, log_folder, self._api_key, adapters)
        self.replicas = self._make_replicas()
        self._router = Router(self.replicas, machine.limits.max_concurrent, self.statistics, log_folder)
        self._requests = PoolRequests(
            self._router,
            self.limits,
            machine.limits.generation_timeout,
            self._check_answer,
            _suspect_other_weights,
            partial(read_tool_format, weights),
        )

    def _make_replicas(self) -> list[Replica]:
        if self.machine.servers.endpoints:
            return [Replica(url, self._api_key, url=url.rstrip("/")) for url in self.machine.servers.endpoints]
        return [self._own.replica(index) for index in range(self.machine.servers.count)]

    async def __aenter__(self) -> Self:
        """Start or join every server.

        Raises:
            ServerError: a server does not come up, or another run holds its lease.
        """
        await self._own.take_kept(self.replicas)
        transport = httpx.AsyncHTTPTransport(socket_options=socket_options())
        self.http = httpx.AsyncClient(
            transport=transport, timeout=self.machine.limits.generation_timeout, trust_env=False
        )
        self._requests.open()
        shared = PoolContext(
            self.http,
            self.machine,
            self.weights,
            self.repeatability,
            self.statistics,
            self.lease,
            describe_run(self.log_folder),
            self.notify,
        )
        self._monitors = PoolMonitors(shared, self.replicas)
        try:
            await self._monitors.start()
        except BaseException:
            await self._close()
            raise
        OPEN.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(keep=kind is None and self._router.broken is None)

    async def _close(self, keep: bool = False) -> None:
        OPEN.discard(self)
        self._router.closed = True
        await self._monitors.close()
        await self._requests.aclose()
        await self.http.aclose()
        await self._own.close(self.replicas, keep)
        log.info("the pool's counts: %s", self.statistics.snapshot())

    # --- Requests ---

    @property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls."""
        return self._requests.tool_format

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Completion:
        """Sample one completion. Calls within milliseconds of each other that differ only in consecutive seeds share
        one request. `tools` are schemas that the chat template renders.

        Raises:
            GenerationFailure: this request failed for good; `reason` says why.
            ServerError: no server is left.
            WeightSyncError: an earlier sync failed.
        """
        return await self._requests.complete(messages, sampling, seed, tools)

    async def sample(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, n: int
    ) -> list[Completion | GenerationFailure]:
        """Return `n` samples of one prompt in order, with a failure in place of each invalid sample.

        Sample i has the seed `seed + i`. The prompt and its images are processed once, which is several times faster
        than n requests. Raises as `complete` does if the request as a whole fails.
        """
        return await self._requests.sample(messages, sampling, seed, n)

    async def _check_answer(self, replica: Replica, weights_id: str, answered: str) -> None:
        await self.weights.check_answer(self.http, replica, weights_id, answered)

    @asynccontextmanager
    async def direct_access(self, requests: int) -> AsyncIterator[list[ServerAccess]]:
        """Yield the access to the ready servers, for a process that sends them up to `requests` requests at once.

        Inside the block the servers keep their weights, because these requests count as in flight.

        Raises:
            ConfigurationError: a server's answers have no id of their weights.
            ServerError: no server is left.
            WeightSyncError: an earlier sync failed.
        """
        async with self._router.admitted(requests, direct=True):
            yield [server_access(replica) for replica in await self._router.ready()]

    def report_suspects(self, suspects: Sequence[SuspectServer]) -> None:
        """Make the pool check the servers that failed direct requests of other processes."""
        for each in suspects:
            for replica in self.replicas:
                if (replica.name, replica.weights_id) == (each.name, each.weights_id):
                    replica.suspect.set()
                    _suspect_other_weights(replica, TransientError(each.reason, "reported by another process"))

    def starting(self) -> list[str]:
        """Return the name of each server that is not ready yet, with the last line of its log."""
        waiting = [(each.name, each.server.activity if each.server else "") for each in self.replicas if not each.ready]
        return [f"{name} ({activity})" if activity else name for name, activity in waiting]

    @property
    def in_flight(self) -> int:
        """Number of requests that servers are answering."""
        return self._router.in_flight

    async def notify(self) -> None:
        """Wake all tasks that wait for a change of the servers or of the requests in flight."""
        await self._router.notify()

    # --- Weights ---

    async def sync(
        self, weights: Path, version: int, publish: Publish | None = None, answer: ProbeAnswer | None = None
    ) -> None:
        """Load new weights into every server, and return once each server has passed the check of its weights.

        New requests wait; requests in flight are finished first, or paused. Caches of the old weights are cleared.
        If a server dies meanwhile, the sync succeeds and the server restarts with the new weights. With weight_transfer
        "nccl" or "ipc" a server that dies during the transfer fails the sync; a server that was gone before, or that
        comes back later, gets the next weights.

        Args:
            weights: a new folder for each version. It must exist until the next call has returned, because a server
                may be started from it.
            publish: makes the trainer send its weights to the given endpoints, with weight_transfer "nccl" or "ipc".
                The folder is then not read.
            answer: the trainer's answer to `weights.probe`, which every server with this version must match. Without
                it, servers are compared with each other only.

        Raises:
            WeightSyncError: the folder holds another model, a server rejected it, a server failed the check, or the
                transfer took longer than `machine.limits.sync_timeout`, not counting the wait for requests. Every later
                request raises this error too.
        """
        if self._router.broken is not None:
            raise self._router.broken
        try:
            async with self._router.drained(self._requests_go_on):
                if not self.weights.single:
                    await self.weights.mark_lost_suspect(self.http, self.replicas)
                    await self._router.reachable()
                async with self.weights.changing, asyncio.timeout(self.machine.limits.sync_timeout):
                    first = self.weights.version == 0
                    await self.weights.give(self.http, self.replicas, weights, version, publish, answer)
                    if first and self.adapters is not None:  # so far servers were tested without an adapter
                        ready = [replica for replica in self.replicas if replica.ready]
                        await asyncio.gather(*(self.repeatability.check(self.http, replica) for replica in ready))
        except BaseException as error:
            # Whatever failed, some servers may now have the new weights and others the old ones.
            self._router.broken = sync_failure(error, weights, version, self.machine.limits.sync_timeout)
            raise (self._router.broken if isinstance(error, Exception) else error) from error.__cause__
        finally:
            await self.notify()

    def _requests_go_on(self) -> bool:
        """Return True if requests continue during `sync`, which needs the id of the weights in every server's
        answers."""
        active = (replica for replica in self.replicas if replica.ready or replica.outstanding)
        return self.weights.in_flight_updates and all(replica.says_weights for replica in active)

    async def reset_caches(self) -> None:
        """Wait until no request is in flight, then clear the servers' caches of prompts and images.

        Raises:
            WeightSyncError: a server could not clear them.
        """
        try:
            async with self._router.drained(), self.weights.changing:
                await asyncio.gather(*(self._reset_caches(replica) for replica in self.replicas if replica.ready))
        finally:
            await self.notify()

    async def _reset_caches(self, replica: Replica) -> None:
        try:
            await reset_caches(self.http, replica.endpoint)
        except httpx.TransportError:
            replica.mark_suspect()  # a restart clears the caches too


def _suspect_other_weights(replica: Replica, error: TransientError) -> None:
    if error.reason == OTHER_WEIGHTS:
        replica.mark_suspect()
