"""Worker extension for vLLM (`--worker-extension-cls`) that loads weight versions stored as deltas.

The extension runs in each worker process of a server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .deltas import HostWeights, bring_to


class Versions:
    """Mixin that adds `load_version` to vLLM's workers. Clients call it through the route /collective_rpc."""

    model_runner: Any
    _held: HostWeights | None = None

    def load_version(self, folder: str) -> None:
        """Load the version in `folder`, a path on this machine, into the model in place.

        The weights are assembled in main memory and stay there, so that the next version needs only its delta.

        Raises:
            ValueError: a delta does not fit the weights that it is applied to, or gives a wrong digest.
            OSError, SafetensorError: a version is missing or damaged.
        """
        held, self._held = self._held, None
        held = bring_to(Path(folder), held)
        self.model_runner.reload_weights(weights_iterator=iter(held.tensors.items()))
        self._held = held
