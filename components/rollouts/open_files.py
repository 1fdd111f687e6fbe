"""How many files this process may have open at once: episodes and requests take some each."""

from __future__ import annotations

import resource

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.threads import HANDLES

OTHER_FILES = 512
"""For what is neither an episode nor its request."""


def allow_episodes(at_once: int) -> None:
    """`allow_open_files` for as many episodes, each with a request in flight."""
    allow_open_files(OTHER_FILES + (HANDLES + 1) * at_once)


def allow_open_files(count: int) -> None:
    """Raise the soft limit to `count` where it is below.

    Raises:
        ConfigurationError: the hard limit is below it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"a process of this user may open {hard} files, and {count} are needed",
            code="too_few_open_files",
            where="machine.max_concurrent",
            remedy="lower machine.max_concurrent, or raise the limit (ulimit -n)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
