"""Let vLLM load checkpoints from folders with brackets, a star or a question mark in their names.

vLLM 0.26 to 0.32 finds the files of a checkpoint with a glob pattern that starts with the unescaped path of the folder,
so it finds no files in a folder called "[v2]".
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace


def take_folders_literally() -> None:
    """Patch vLLM's weight loaders so that only the file name of a glob pattern is a pattern, not its folder."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    for module in (default_loader, weight_utils):
        module.glob = SimpleNamespace(glob=_glob)


def _glob(pattern: str) -> list[str]:
    return [str(path) for path in Path(pattern).parent.glob(Path(pattern).name)]
