"""Files that others made: a path may lead to a pipe, a device or a folder in place of a file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """The path of a regular file, or of a link to one, which can be opened without waiting for anybody.

    To open a pipe waits until someone writes into it, and a device may never end.

    Raises:
        OSError: there is no such file, or it is a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 (no error of its own for a name that is too long)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path
