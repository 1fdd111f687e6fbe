"""Versions of the packages and the kind of processor on which servers and robot policies compute answers."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from armature.components.contracts.files import read_bytes
from armature.components.contracts.installation import installed_commit, installed_version
from armature.components.contracts.machine import Machine

SERVER_PACKAGES = ("vllm", "torch", "transformers")
"""Packages of the servers' Python environment on which the bits of an answer depend."""
POLICY_PACKAGES = ("torch", "transformers", "numpy", "mujoco", "robosuite", "hf-libero")
"""Packages of this environment on which the bits of a robot policy and of its simulator depend."""
COMMIT = "commit"
"""Key of the git commit; "" if it is not known, as in an installed wheel."""


def versions(machine: Machine) -> dict[str, str]:
    """Return what the bits of answers depend on besides settings and weights, each as text by name.

    `device` is "cpu", "gpu", or "elsewhere" for joined servers and servers of a cluster, whose packages are not known.
    `threads` is the number of CPU threads of each server.

    Example:
        >>> sorted(versions(Machine()))
        ['armature', 'commit', 'device', 'processor', 'python', 'threads', 'torch', 'transformers', 'vllm']
    """
    elsewhere = machine.joins_servers or machine.server_bundle is not None
    device = "elsewhere" if elsewhere else "gpu" if machine.gpus_of_server(0) else "cpu"
    library = machine.server_interpreter.parent.parent / "lib"
    folders = [str(path) for path in sorted(library.glob("python*/site-packages"))] if not elsewhere else []
    return _facts(SERVER_PACKAGES, folders) | {"threads": str(machine.server_threads), "device": device}


def policy_versions(machine: Machine) -> dict[str, str]:
    """Return what the bits of an evaluation in LIBERO depend on besides settings and weights, as `versions` does.

    The policy and the simulators compute in the environment of this interpreter. `renderer` is MUJOCO_GL.
    """
    import torch

    return _facts(POLICY_PACKAGES, sys.path) | {
        "renderer": os.environ.get("MUJOCO_GL", "egl"),
        "threads": str(machine.threads or torch.get_num_threads()),
        "device": "gpu" if torch.cuda.is_available() else "cpu",
    }


def _facts(packages: Sequence[str], folders: list[str]) -> dict[str, str]:
    """Return the versions of Armature, of Python and of the packages in `folders`, and the processor's name."""
    installed = {name: next(iter(distributions(name=name, path=folders)), None) for name in packages}
    return {
        "armature": installed_version(),
        COMMIT: installed_commit(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: each.version if each else "" for name, each in installed.items()},
        "processor": processor(),
    }


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's processor, or of its architecture if the system does not tell the name."""
    try:
        text = read_bytes(path).decode(errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.machine()
