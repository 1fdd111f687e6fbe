"""Events for a loop that has its own progress bar."""

from __future__ import annotations

from collections.abc import Mapping

from tqdm import tqdm

from components.contracts.stages import Artifact


class NullEvents:
    """Events of rollouts, of which only messages are shown: the progress bar is the trainer's."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None:
        tqdm.write(text)
