"""Resolution of branches and tags of Hugging Face hub repositories to commits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from armature.components.contracts.errors import DataError

HUB = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
RepositoryKind = Literal["model", "dataset"]


@dataclass(frozen=True)
class HubCommit:
    """The commit of a repository's `revision`. `answered` is True if the hub reported it, not this machine's cache."""

    name: str
    revision: str
    commit: str
    answered: bool

    def __str__(self) -> str:
        source = "" if self.answered else ", as the local cache has it: the hub cannot be reached"
        return f"{self.name}: {self.revision} is commit {self.commit}{source}"


def hub_commit(name: str, revision: str, kind: RepositoryKind) -> HubCommit:
    """Return the commit of a branch or tag, with one request to the hub. A commit is returned unchanged.

    If the hub cannot be reached, the local cache (refs) provides the commit of the last successful request.

    Raises:
        DataError: there is no such repository or revision, or neither hub nor cache knows it.
    """
    if COMMIT.fullmatch(revision):
        return HubCommit(name, revision, revision, True)
    from huggingface_hub import HfApi

    class Hub(HfApi):
        answered = False

        def repo_info(self, *arguments: Any, **keywords: Any) -> Any:
            info = super().repo_info(*arguments, **keywords)
            self.answered = True
            return info

    hub = Hub()
    try:
        resolution = hub.resolve_revision(name, repo_type=kind, revision=revision)
    except Exception as error:  # errors of the network, the hub, or an invalid name
        raise DataError(
            f"the {kind} cannot be reached: {str(error).splitlines()[0] if str(error) else repr(error)}",
            code="repository_unavailable",
            where=f"{name} at {revision}",
            remedy=f"check the name, the revision and the network, log in for a gated {kind}, or give a folder; "
            "without a network, give the commit of what was fetched before",
        ) from error
    return HubCommit(name, revision, resolution.resolved, hub.answered)


def commit_of(name: str, revision: str, kind: RepositoryKind, say: Callable[[str], None]) -> str:
    """Return the commit as `hub_commit` does, and report the commit of a branch or tag to `say`."""
    resolved = hub_commit(name, revision, kind)
    if resolved.commit != revision:
        say(str(resolved))
    return resolved.commit
