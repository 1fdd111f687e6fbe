"""The weights that the servers of a pool hold, and their update on all servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from armature.components.artifacts.tensors import read_tensors
from armature.components.contracts.errors import ArmatureError, ServerError, WeightSyncError
from armature.components.inference.client import MODEL_NAME, OTHER_WEIGHTS, TransientError
from armature.components.inference.command import read_config, served_name
from armature.components.inference.lease import in_order, read_weights_id
from armature.components.inference.probe import Probe, ProbeAnswer, SyncCheck
from armature.components.inference.replica import Replica, pause, reset_caches, resume
from armature.components.inference.server import fault
from armature.components.inference.weights import WEIGHT_TRANSFERS, Publish, WeightTransfer

log = logging.getLogger(__name__)

_RESUME = 10.0
"""Seconds that paused servers get to resume after a failed sync."""


class ServedWeights:
    """The current weights of a pool: their version, the folder to start a server from, and the check of each server.

    A server passes `sync_check` after every update, and again when it joins or restarts: its log-probs of a fixed
    prompt must equal the trainer's.

    Attributes:
        changing: lock held while a server joins or weights change, so that neither happens in the middle of the other.
        in_flight_updates: requests are paused while weights change, and continue with the new weights.
        folder, folder_version: checkpoint folder that a server is started with, and its version. It is older than the
            current weights if the trainer has since sent weights from its GPUs, or an adapter.
        latest: folder with the current version, unless the trainer sent it from its GPUs. If it holds an adapter, a
            server needs `folder` as well.
    """

    def __init__(
        self,
        weights: Path,
        transfer: str,
        sync_check: SyncCheck,
        load_on_join: bool,
        adapters: bool = False,
        in_flight_updates: bool = False,
    ) -> None:
        self.folder, self.folder_version, self.version = weights.absolute(), 0, 0
        self.latest = self.folder
        self._load_on_join, self._adapters = load_on_join, adapters
        self.changing = asyncio.Lock()
        self.in_flight_updates = in_flight_updates
        self._transfer: WeightTransfer = WEIGHT_TRANSFERS[transfer]()
        self._shapes = _loaded_shapes(weights)
        self.sync_check = sync_check

    @property
    def single(self) -> bool:
        """True if one server can be updated alone; False if the trainer sends weights to all servers together."""
        return self._transfer.single

    @property
    def probe(self) -> Probe:
        """The fixed prompt that servers and trainer score after each update."""
        return self.sync_check.probe

    async def give(
        self,
        http: httpx.AsyncClient,
        replicas: Sequence[Replica],
        weights: Path,
        version: int,
        publish: Publish | None,
        answer: ProbeAnswer | None,
    ) -> None:
        """Load the new weights into every ready replica, and check each one. The caller holds `changing`.

        Raises:
            DataError: the folder cannot be read.
            WeightSyncError: the folder holds another model, a server rejected it, or a server's log-probs differ from
                the trainer's.
        """
        if version <= self.version:
            raise WeightSyncError(
                f"version {version} is not newer than {self.version}",
                code="weights_version_not_newer",
                where=str(weights),
                remedy="pass a larger version with every sync",
            )
        if self.single:
            self.latest = weights.absolute()
            if self._transfer.whole(weights):
                self._check_folder(weights)
                self.folder, self.folder_version = self.latest, version
        self.version = version
        if answer is not None:
            self.sync_check.expect(version, answer)
        if self.single:
            await asyncio.gather(*(self._bring_up_to_date(http, replica) for replica in replicas if replica.ready))
            return
        if not (receivers := _up(replicas)):
            raise WeightSyncError(
                "no server is up", code="no_server_up", where=str(weights), remedy="resume from the last checkpoint"
            )
        try:
            await self._load(http, receivers, weights, publish)
            await asyncio.gather(*(self._verify(http, replica) for replica in receivers))
        except httpx.TransportError as error:
            raise WeightSyncError(
                f"a server disconnected: {error!r}",
                code="sync_connection_lost",
                where=str(weights),
                remedy="resume from the last checkpoint",
            ) from error
        for replica in receivers:
            if replica.waits:
                replica.waits = False
                replica.suspect.set()  # its monitor lets requests through

    async def mark_lost_suspect(self, http: httpx.AsyncClient, replicas: Sequence[Replica]) -> None:
        """Exclude servers that are gone or have restarted since they joined: a collective transfer would hang on
        them."""
        up = _up(replicas)
        for replica, lost in zip(up, await asyncio.gather(*(_lost(http, each) for each in up)), strict=True):
            if lost:
                log.warning("%s is left out of the sync: %s", replica.name, lost)
                replica.mark_suspect()

    async def make_current(self, http: httpx.AsyncClient, replica: Replica) -> bool:
        """Bring a joining server to the current weights and check it. Return True if it may be used now.

        A server that can only get weights together with all others is marked as waiting for the next sync
        (`Replica.waits`).

        Raises:
            WeightSyncError: the server does not hold the current weights.
            httpx.TransportError: the server is gone.
        """
        if replica.server is None:
            await resume(http, replica.endpoint)  # an earlier run may have been killed while the server was paused
        replica.ours_since = await read_weights_id(http, replica.endpoint)
        if replica.version == self.version:
            await self._check(http, replica)
            return True
        never_synced = self.version == 0
        if self.single and (not never_synced or (self._load_on_join and self._transfer.whole(self.folder))):
            return await self._bring_up_to_date(http, replica)
        if never_synced:
            # A joined server was started by its user, who should have used this folder. There is no trainer's answer
            # yet: the first server's answer is the reference for the others.
            await self._check(http, replica)
            replica.version = self.version
            return True
        replica.weights_id = await read_weights_id(http, replica.endpoint)
        replica.waits = True
        log.warning("%s gets weights with the next sync: only the trainer has version %d", replica.name, self.version)
        return False

    async def load_again(self, http: httpx.AsyncClient, replica: Replica) -> bool:
        """Load the pool's current weights into a server that already has them, in place, as a sync does.

        Return False without loading if no folder holds all of these weights, or if the server has other weights.

        Raises:
            WeightSyncError: the server rejected them, or its log-probs have changed.
            httpx.TransportError: the server is gone.
        """
        ours = self.version > 0 or self._load_on_join or replica.server is not None
        if not self.single or self._adapters or not ours or not self._transfer.whole(self.latest):
            return False
        await self._load(http, [replica], self.latest, None)
        await self._check(http, replica)
        return True

    def _check_folder(self, weights: Path) -> None:
        shapes = _loaded_shapes(weights)
        if shapes == self._shapes:
            return
        names = shapes.keys() | self._shapes.keys()
        name = min(name for name in names if shapes.get(name) != self._shapes.get(name))
        raise WeightSyncError(
            f"a checkpoint of another model: {name} is {shapes.get(name, 'missing')}, the servers have "
            f"{self._shapes.get(name, 'none')}",
            code="served_shapes_differ",
            where=str(weights),
            remedy="publish with the names and shapes of the checkpoint that the servers started with",
        )

    async def _bring_up_to_date(self, http: httpx.AsyncClient, replica: Replica) -> bool:
        """Load the current weights into one server and check it. Return False if it is gone; its monitor restarts
        it."""
        try:
            await self._load(http, [replica], self.latest, None)
            await self._verify(http, replica)
        except httpx.TransportError as error:
            log.warning("%s disconnected while it received weights: %r", replica.name, error)
            replica.ready = False
            replica.suspect.set()
            return False
        return True

    async def _load(
        self, http: httpx.AsyncClient, replicas: Sequence[Replica], weights: Path, publish: Publish | None
    ) -> None:
        """Load the weights into all `replicas` and clear everything that they cached with the old weights."""
        endpoints = [replica.endpoint for replica in replicas]
        if not self.in_flight_updates:
            await self._transfer.transfer(http, endpoints, weights, publish)
            await asyncio.gather(*(reset_caches(http, endpoint) for endpoint in endpoints))
            return
        try:
            await _all(self._pause(http, replica) for replica in replicas)
            await self._transfer.transfer(http, endpoints, weights, publish)
        except BaseException:
            # The next run that uses these servers must not find them paused.
            with suppress(TimeoutError):
                async with asyncio.timeout(_RESUME):
                    await asyncio.gather(*(resume(http, endpoint) for endpoint in endpoints), return_exceptions=True)
            raise
        await _all(resume(http, endpoint) for endpoint in endpoints)

    async def _pause(self, http: httpx.AsyncClient, replica: Replica) -> None:
        if (weights_id := await read_weights_id(http, replica.endpoint)) != replica.weights_id:
            # Another run has had the server since: an answer that was begun before this moment may mix its weights in.
            replica.ours_since = weights_id
        await pause(http, replica.endpoint)

    async def _verify(self, http: httpx.AsyncClient, replica: Replica) -> None:
        await self._check(http, replica)
        replica.version = self.version

    async def _check(self, http: httpx.AsyncClient, replica: Replica) -> None:
        """Check that the server holds the current weights under the model name that requests use."""
        replica.model = served_name(self.latest) if self._adapters and self.version else MODEL_NAME
        replica.weights_id = await read_weights_id(http, replica.endpoint)
        await self.sync_check.check(http, replica, self.version)

    async def check_answer(self, http: httpx.AsyncClient, replica: Replica, weights_id: str, answered: str) -> None:
        """Check that an answer was computed with the weights that this pool gave the server.

        A server with our plug-in sends the id of its weights with every answer. A joined server without it scores the
        fixed prompt again after the answer; answers that arrive during one check share the next one.

        Args:
            weights_id: `replica.weights_id` when the request was sent.
            answered: the id of weights in the answer's header.

        Raises:
            TransientError: the answer was computed with other weights, or the server is gone.
        """
        if answered != weights_id and not await self._updated(replica, weights_id, answered):
            raise TransientError(OTHER_WEIGHTS, f"{replica.name} was restarted, or another run changed its weights")
        if weights_id or replica.server is not None:
            return
        before = replica.answer_checks
        async with replica.checking:
            if replica.passed_check > before:
                return
            replica.answer_checks += 1
            number = replica.answer_checks
            try:
                await self.sync_check.check(http, replica, self.version)
            except httpx.TransportError as error:
                raise TransientError("connection_lost", f"{replica.name}: {error!r}") from error
            except ServerError as error:
                replica.given_up = replica.given_up or error
                raise TransientError(
                    OTHER_WEIGHTS, f"{replica.name} does not have the weights that this pool gave it"
                ) from error
            replica.passed_check = number

    async def _updated(self, replica: Replica, weights_id: str, answered: str) -> bool:
        """Return True if the id of a server's weights changed during a request only because this pool updated them."""
        if not self.in_flight_updates:
            return False
        async with self.changing:
            return in_order(replica.ours_since, weights_id, answered, replica.weights_id)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait until all `works` have ended, then raise the error of the first one that failed, if any."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _up(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.ready or replica.waits]


async def _lost(http: httpx.AsyncClient, replica: Replica) -> str:
    """Return the reason why the server cannot receive weights any more, or ""."""
    try:
        if reason := await fault(http, replica.endpoint):
            return reason
        same = await read_weights_id(http, replica.endpoint) == replica.weights_id
    except (ServerError, httpx.TransportError) as error:
        return repr(error)
    return "" if same else "it was restarted, or another run changed its weights"


def _loaded_shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that servers load from a checkpoint, by name.

    Dtypes are not included, because servers convert them. A tied output head is not included either: some checkpoints
    store it as a copy of the embedding, and others leave it out.
    """
    tied = bool(read_config(weights).get("tie_word_embeddings"))
    shapes = {name: shape for name, (_, shape) in read_tensors(weights).items()}
    return {name: shape for name, shape in shapes.items() if not (tied and name.endswith("lm_head.weight"))}


def sync_failure(error: BaseException, weights: Path, version: int, timeout: float) -> WeightSyncError:
    """Return the error that every request raises after a sync failed with `error`."""
    if isinstance(error, WeightSyncError):
        return error
    if isinstance(error, ArmatureError):
        return WeightSyncError(error.what, code=error.code, where=error.where, remedy=error.remedy)
    if isinstance(error, TimeoutError):
        return WeightSyncError(
            f"version {version} did not reach every server in {timeout:g} s",
            code="sync_timeout",
            where=str(weights),
            remedy="raise machine.limits.sync_timeout, or read the servers' logs",
        )
    return WeightSyncError(
        f"version {version} may not be on every server: {error!r}", code="sync_incomplete", where=str(weights)
    )
