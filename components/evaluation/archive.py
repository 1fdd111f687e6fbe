"""The .zip file of a bundle, which a stranger may have made."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isclose
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import foreign, regular

CLAIMS_FILE, EPISODES_FILE = "bundle.json", "episodes.jsonl"
MAX_FILE_BYTES = 2**28
"""Largest size in bytes of each file of a bundle."""


class Claims(BaseModel):
    """The claims about an evaluation as a whole, of every kind of bundle.

    Attributes:
        settings: sections of the stage's recipe as they were used.
        policy: digest of the policy's artifact.
        policy_sha256: SHA-256 of the policy's checkpoint.
        armature: version of the package that made the artifact.
        versions: see `components/machine/versions.py`; empty if they were not recorded.
        metrics: the content of `metrics.json`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundle_version: Literal[1] = 1
    settings: dict[str, Any]
    policy: str
    policy_sha256: str
    armature: str
    versions: dict[str, str]
    metrics: dict[str, Any]

    def contradictions(self, numbers: Mapping[str, Any]) -> list[str]:
        """Return sentences about claims that cannot be true. `numbers` is the summary that the rows give."""
        problems = _summary_contradictions(self.metrics, numbers)
        made = self.versions.get("armature", self.armature)
        if made != self.armature:
            problems.append(f"it was made with armature {self.armature!a:.40}, and with {made!a:.40}")
        return problems


def write_files(target: Path, files: Mapping[str, bytes]) -> None:
    """Write the files to the .zip file `target`. Equal files give equal bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


@contextmanager
def opened(path: Path) -> Iterator[Callable[[str], bytes]]:
    """Open a bundle, and give a function that returns the content of a file of it. Nothing is unpacked.

    Raises:
        DataError: it is not a bundle, a file of it is larger than `MAX_FILE_BYTES`, or the block raises ValueError or
            another error of foreign data.
    """
    with (
        foreign("not a bundle", where=str(path), remedy="give a file that `armature bundle` wrote"),
        zipfile.ZipFile(regular(path)) as archive,
    ):
        yield lambda name: _content(archive, name)


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a file of the archive. Its size in the archive's index may be wrong, so it is not used."""
    with archive.open(name) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(
            f"a file of the bundle has more than {MAX_FILE_BYTES} bytes",
            code="bundle_too_large",
            where=name,
            remedy="ask for a bundle of fewer episodes",
        )
    return content


def _summary_contradictions(claimed: Mapping[str, Any], numbers: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the first number of a bundle's summary that its rows do not give, if there is one."""
    computed = json.loads(json.dumps(numbers))
    wrong = [key for key in computed | claimed if not _close(computed.get(key), claimed.get(key))]
    shown = [(key, claimed.get(key), computed.get(key)) for key in wrong[:1]]
    return [f"{key!a:.40} of the summary is {one!a:.40}, by the rows {other!a:.40}" for key, one, other in shown]


def _close(ours: Any, claimed: Any) -> bool:
    """Check that two documents are equal, up to rounding of their numbers: releases of Python sum differently."""
    if isinstance(ours, dict) and isinstance(claimed, dict):
        return ours.keys() == claimed.keys() and all(_close(ours[key], claimed[key]) for key in ours)
    if isinstance(ours, float) and isinstance(claimed, int | float):
        return isclose(ours, claimed, rel_tol=1e-9, abs_tol=1e-12)
    return bool(ours == claimed)
