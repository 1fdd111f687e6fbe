"""The newest checkpoint of an unfinished stage in a remote store, for another machine to resume from.

`workspaces/<stage>-<fingerprint>/newest.json` names the folder beside it that is whole, and what its files hold.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, ConfigDict, ValidationError

from armature.components.artifacts.digests import file_digest
from armature.components.artifacts.disk import sync_tree
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.contracts.errors import DataError

WORKSPACES = "workspaces"
NEWEST = "newest.json"
_STEP = re.compile(r"step-(\d+)")


class Newest(BaseModel):
    """`checkpoint` is its folder in the workspace, step-NNNNNN in some folder; `parts` are what is put in place as a
    whole, the checkpoint among them; `files` maps relpath to md5."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    checkpoint: str
    parts: tuple[str, ...]
    files: dict[str, str]


class RemoteCheckpoints:
    """Raises StoreError as `RemoteFolder` does."""

    def __init__(self, files: RemoteFolder) -> None:
        self._files = files

    def push(self, workspace: str, number: int, snapshot: Path, checkpoint: str) -> None:
        """Send what is in `snapshot`, which has the checkpoint at the relpath `checkpoint`, and delete those before;
        nothing where the remote has one of more steps, from a machine that has gone on since.

        Args:
            number: larger than that of the one before.
        """
        home, folder = f"{WORKSPACES}/{workspace}", f"{number}"
        there = self.newest(workspace)
        if there is not None and _steps(there.checkpoint) > _steps(checkpoint):
            return
        paths = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*") if path.is_file()}
        within = Path(checkpoint).parts[0]
        parts = [*sorted({name.split("/")[0] for name in paths} - {within}), checkpoint]
        newest = Newest(
            folder=folder,
            checkpoint=checkpoint,
            parts=tuple(parts),
            files={name: file_digest(path) for name, path in paths.items()},
        )
        self._files.put({f"{home}/{folder}/{name}": path for name, path in paths.items()})
        self._files.write(f"{home}/{NEWEST}", newest.model_dump_json().encode())
        for other in self._files.listed(home):
            if other.isdecimal() and int(other) < number:
                self._files.remove(f"{home}/{other}")

    def fetch(self, workspace: Path, say: Callable[[str], None]) -> None:
        """Put the remote checkpoint into `workspace`, unless that has one of as many steps.

        Raises:
            DataError: the remote copy is damaged.
        """
        home, newest = f"{WORKSPACES}/{workspace.name}", self.newest(workspace.name)
        if newest is None:
            return
        for name in (newest.checkpoint, *newest.parts, *newest.files):
            if not name or not (workspace / name).resolve().is_relative_to(workspace.resolve()):
                raise _damaged(home, f"the name {name!r}")
        here = [_steps(path.name) for path in (workspace / newest.checkpoint).parent.glob("step-*")]
        if max(here, default=-1) >= _steps(newest.checkpoint):
            return
        with TemporaryDirectory(prefix=".fetched-", dir=workspace) as scratch:
            files = {f"{home}/{newest.folder}/{name}": Path(scratch) / name for name in newest.files}
            self._files.get(files)
            for name, digest in newest.files.items():
                if file_digest(Path(scratch) / name) != digest:
                    raise _damaged(f"{home}/{newest.folder}/{name}", "other bytes than were sent")
            sync_tree(Path(scratch))
            for part in (*(part for part in newest.parts if part != newest.checkpoint), newest.checkpoint):
                target = workspace / part
                if target.is_dir():
                    shutil.rmtree(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                (Path(scratch) / part).rename(target)
        say(f"the remote store has a checkpoint of {_steps(newest.checkpoint)} steps, fetched")

    def newest(self, workspace: str) -> Newest | None:
        """
        Raises:
            DataError: it cannot be read.
        """
        name = f"{WORKSPACES}/{workspace}/{NEWEST}"
        content = self._files.read_if_there(name)
        try:
            return None if content is None else Newest.model_validate_json(content)
        except ValidationError as error:
            raise _damaged(name, error) from error

    def remove(self, workspace: str) -> None:
        self._files.remove(f"{WORKSPACES}/{workspace}/{NEWEST}")
        self._files.remove(f"{WORKSPACES}/{workspace}")


def _steps(checkpoint: str) -> int:
    found = _STEP.fullmatch(checkpoint.rpartition("/")[2])
    return int(found[1]) if found else -1


def _damaged(where: str, why: object) -> DataError:
    return DataError(
        f"the remote copy of a checkpoint is damaged: {why}",
        code="remote_checkpoint_damaged",
        where=where,
        remedy="delete its folder in the remote store: training then begins from its batches",
    )
