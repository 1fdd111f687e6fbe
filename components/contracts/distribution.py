"""What pip installs. It is not called as the package and the command: `armature` on PyPI is another project."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "armature-vla"


def installed_version() -> str:
    return version(DISTRIBUTION)


def install_command(extra: str) -> str:
    """How a user gets the packages of an optional part."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
