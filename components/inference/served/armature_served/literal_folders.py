"""A checkpoint's folder may have brackets, a star or a question mark in its name.

vLLM 0.26 to 0.32 looks for the files of a checkpoint by a pattern that begins with the folder as it is, and finds none
in a folder called "[v2]".
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace


def take_folders_literally() -> None:
    """Have vLLM's loaders match the last part of a pattern alone."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    for module in (default_loader, weight_utils):
        module.glob = SimpleNamespace(glob=_glob)


def _glob(pattern: str) -> list[str]:
    return [str(path) for path in Path(pattern).parent.glob(Path(pattern).name)]
