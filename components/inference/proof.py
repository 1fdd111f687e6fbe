"""That a server holds the weights that it was given: it answers the probe as the trainer does."""

from __future__ import annotations

import httpx
import numpy as np

from armature.components.contracts.errors import WeightSyncError
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.probe import Probe, ProbeAnswer, ask_probe
from armature.components.inference.replica import Replica
from armature.components.inference.settings import ServerSettings
from armature.components.installation import SERVED

CPU_FLOAT32, GPU_FLOAT32, SIXTEEN_BITS, EIGHT_BITS = 1e-4, 5e-3, 0.1, 0.5
"""Tolerances in nats; GPUs multiply fp32 as tf32. Measured on tiny checkpoints: see docs/operations.md. In 8 bits,
3.75 B random weights had a mismatch KL of 0.05, which is about 0.3 nats."""
FIRST = "the first server that was asked"


class SyncProof:
    """What the servers have to answer at the current version.

    That is the trainer's answer; of a version that no trainer sent, the answer of the first server that is asked.
    """

    def __init__(self, probe: Probe, settings: ServerSettings, machine: Machine) -> None:
        self.probe = probe
        self._dtype, self._machine, self._quantized = settings.dtype, machine, settings.quantization is not None
        self._expected: tuple[int, ProbeAnswer, str] | None = None
        self._before: tuple[int, LogProbs] | None = None

    def expect(self, version: int, answer: ProbeAnswer, whose: str = "the trainer") -> None:
        if self._expected is not None and self._expected[0] != version:
            self._before = self._expected[0], self._expected[1].logprobs
        self._expected = version, answer, whose

    async def check(self, http: httpx.AsyncClient, replica: Replica, version: int) -> None:
        """
        Raises:
            WeightSyncError: the server does not answer as expected.
            httpx.TransportError: it is gone.
        """
        values = await ask_probe(http, replica.endpoint, self.probe, replica.model)
        if self._expected is None or self._expected[0] != version:
            self.expect(version, ProbeAnswer(values, self._dtype), FIRST)
        assert self._expected is not None
        _, expected, whose = self._expected
        if len(values) != len(expected.logprobs):
            raise WeightSyncError(
                f"{len(values)} log-probs, {whose} gave {len(expected.logprobs)}",
                code="probe_length_mismatch",
                where=replica.name,
            )
        difference, tolerance = distance(values, expected.logprobs), self._tolerance(expected.dtype)
        if difference <= tolerance:
            return
        at = int(np.argmax(np.nan_to_num(np.abs(values - expected.logprobs), nan=np.inf)))
        what = (
            f"at version {version} it does not hold the weights of {whose}: its log-probs of a probe differ by "
            f"{difference:.3g} nats (root mean square; {tolerance:g} is allowed), most at number {at} of "
            f"{len(values)}: {values[at]:.6g}, and {expected.logprobs[at]:.6g} of {whose}"
        )
        raise self._difference(what, values, expected.logprobs, tolerance, replica.name)

    def _tolerance(self, dtype: str) -> float:
        machine = self._machine
        if machine.sync_tolerance is not None:
            return machine.sync_tolerance
        if self._quantized:
            return EIGHT_BITS
        if {dtype, self._dtype} != {"float32"}:
            return SIXTEEN_BITS
        return GPU_FLOAT32 if machine.joins_servers or machine.gpus_of_server(0) else CPU_FLOAT32

    def _difference(
        self, what: str, values: LogProbs, expected: LogProbs, tolerance: float, where: str
    ) -> WeightSyncError:
        text = len(self.probe.tokens) - 1
        if not np.isfinite(values).all():
            return WeightSyncError(
                what,
                code="served_weights_not_finite",
                where=where,
                remedy="the weights are not finite: lower the learning rate and resume from an earlier checkpoint",
            )
        if self._before is not None and distance(values, self._before[1]) <= tolerance:
            return WeightSyncError(
                what,
                code="served_weights_old",
                where=where,
                remedy=f"it still holds version {self._before[0]}: read its log for why it loaded nothing",
            )
        if distance(values[:text], expected[:text]) <= tolerance:
            return WeightSyncError(
                what,
                code="served_vision_weights_differ",
                where=where,
                remedy="text alone agrees, an image does not: its vision weights were not loaded, or it processes or "
                "attends to images otherwise than the trainer; read its log for weights that were not loaded",
            )
        return WeightSyncError(
            what,
            code="served_weights_differ",
            where=where,
            remedy="some of its weights were not loaded: read its log. A joined server on CPU keeps an old output head "
            f"where embeddings are tied unless it has our plug-in: pip install --no-deps {SERVED}. If it computes in "
            "other types than the trainer, say so in inference.dtype or raise machine.sync_tolerance",
        )


def distance(one: LogProbs, other: LogProbs) -> float:
    """Root mean square difference; NaN if a value is."""
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))
