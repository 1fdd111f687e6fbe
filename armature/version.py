"""Which version of this code runs."""

from __future__ import annotations

from armature.components.installation import installed_commit, installed_version


def package_version() -> str:
    """`<version>+<commit>`, or the version alone where the commit is unknown."""
    commit, _, changed = installed_commit().partition("+")
    local = f"{commit[:9]}.{changed}".strip(".")
    return f"{installed_version()}+{local}" if local else installed_version()
