"""Sums over the GPUs of one node by their copy engines, beside kernels that want all of a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from armature.components.models.installed import is_installed
from armature.components.training.ranks import Ranks

PIECE = 2**24
"""Numbers of a tensor that are summed at a time. A lane holds four bytes for each, and for each that a rank adds up."""
LANES = 4
"""Pieces that are on their way at once."""
SENT, SUMMED = range(2)
"""Flags of a piece: a rank has sent its numbers, has added up its part."""

log = logging.getLogger(__name__)


def peer_copies(ranks: Ranks) -> PeerCopies | None:
    """None where GPUs cannot have each other's memory. Every rank calls it."""
    if ranks.device.type != "cuda" or not ranks.one_node or not is_installed("cuda-bindings"):
        return None
    devices = ranks.gather(ranks.device.index)
    pairs = [(one, other) for one in devices for other in devices if one != other]
    if len(set(devices)) < ranks.size or not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        return None
    try:
        made, failure = PeerCopies(ranks), None
    except (ImportError, RuntimeError) as error:  # a container may forbid that processes share memory of a GPU
        made, failure = None, str(error).splitlines()[0]
    for other in ranks.gather(failure):
        if other is not None:
            log.warning("gradients are summed by NCCL, since GPUs cannot share memory: %s", other)
            return None
    return made


class PeerCopies:
    """All-reduce in fp32 in which copy engines move what NCCL's kernels would, and short kernels add.

    A product on a Hopper GPU uses all multiprocessors, so it waits for any kernel that holds some of them. Here the
    front end of the GPU waits for other ranks (`cuStreamWaitValue32`), and no kernel does. Each rank adds up its own
    part of a tensor, so all get the same bits. Such a wait has no time limit: hosts have to find out by other means
    that one of them is gone.

    Raises:
        ImportError, RuntimeError: memory cannot be shared, or streams cannot wait for other GPUs.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._lanes = [_Lane(ranks) for _ in range(LANES)]
        self._next = 0
        torch.cuda.synchronize(ranks.device)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """See `Ranks.begin_sum`. Every rank constructs its own before one of them calls this."""
        here, done = torch.cuda.current_stream().record_event(), list[torch.cuda.Event]()
        for piece in tensor.view(-1).split(PIECE):
            done.append(self._lanes[self._next].sum(piece, here))
            self._next = (self._next + 1) % LANES

        def wait() -> None:
            for event in done:
                torch.cuda.current_stream().wait_event(event)

        return wait


class _Lane:
    """Sums pieces one after another, in a stream of its own.

    Buffers are free for the next piece without a flag for it: who has added up its part has read what others sent, and
    who sends numbers of the next piece has read the sums of this one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._size, self._pieces = ranks.rank, ranks.size, 0
        self._others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._stream = torch.cuda.Stream(ranks.device, priority=-1)
        self._share = -(-PIECE // ranks.size)
        numbers, flags = (ranks.size + 1) * self._share, 2 * ranks.size
        buffer = symmetric_memory.empty(numbers + flags, dtype=torch.float32, device=ranks.device).zero_()
        assert dist.group.WORLD is not None
        self._shared = symmetric_memory.rendezvous(buffer, dist.group.WORLD)
        self._flags = [pointer + 4 * numbers for pointer in self._shared.buffer_ptrs]
        self._signal(SENT)  # fails here if it cannot be done at all
        self._wait(SENT)

    def sum(self, piece: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Sum at most `PIECE` numbers in place. Returns an event that is recorded when they are summed."""
        share = -(-len(piece) // self._size)
        parts = [piece[rank * share : (rank + 1) * share] for rank in range(self._size)]
        own = parts[self._rank]
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            self._pieces += 1
            for other in self._others:
                self._buffer(other, self._rank, parts[other]).copy_(parts[other])
            self._signal(SENT)
            self._wait(SENT)
            for other in self._others:
                own.add_(self._buffer(self._rank, other, own))
            self._buffer(self._rank, self._size, own).copy_(own)
            self._signal(SUMMED)
            self._wait(SUMMED)
            for other in self._others:
                parts[other].copy_(self._buffer(other, self._size, parts[other]))
            return self._stream.record_event()

    def _buffer(self, rank: int, place: int, like: Tensor) -> Tensor:
        """Of the memory of `rank`: what the rank `place` sends to it, or behind that of all ranks its own sums."""
        return self._shared.get_buffer(rank, like.shape, torch.float32, place * self._share)

    def _signal(self, flag: int) -> None:
        """Set a flag for this piece on all other ranks, when the stream gets here."""
        for other in self._others:
            address = self._flag(other, flag, self._rank)
            _checked(_driver().cuStreamWriteValue32(self._stream.cuda_stream, address, self._pieces, 0))

    def _wait(self, flag: int) -> None:
        """Let the stream wait until all other ranks have set a flag for this piece."""
        for other in self._others:
            address = self._flag(self._rank, flag, other)
            _checked(_driver().cuStreamWaitValue32(self._stream.cuda_stream, address, self._pieces, 0))

    def _flag(self, rank: int, flag: int, sender: int) -> int:
        return self._flags[rank] + 4 * (flag * self._size + sender)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(result: tuple[Any, ...]) -> None:
    if result[0]:
        raise RuntimeError(f"CUDA does not let a stream wait for another GPU: {result[0].name}")
