"""Runs inside each worker of a vLLM server (`--worker-extension-cls`): loads a version that is kept as a delta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .deltas import HostWeights, bring_to


class Versions:
    """A method of vLLM's workers, called through /collective_rpc."""

    model_runner: Any
    _held: HostWeights | None = None

    def load_version(self, folder: str) -> None:
        """Load the version in `folder`, a path of this machine's, in place.

        It is put together in main memory, where it stays for the next one.

        Raises:
            ValueError: changes that do not add up.
            OSError, SafetensorError: a version is missing or damaged.
        """
        held, self._held = self._held, None
        held = bring_to(Path(folder), held)
        self.model_runner.reload_weights(weights_iterator=iter(held.tensors.items()))
        self._held = held
