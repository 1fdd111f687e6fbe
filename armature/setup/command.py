"""`armature setup`: create the environment of the model servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.installation import server_environment
from armature.setup import set_up


def make_server_environment(folder: Path | None) -> None:
    """Create the environment of the model servers.

    Args:
        folder: its folder; None: the folder in which runs look for it.

    Raises:
        ConfigurationError: the folder has other files in it.
        ArmatureError: a package could not be installed.
    """
    folder = folder or server_environment()
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise ConfigurationError(
            "the folder is not empty and not a Python environment, so it is not changed",
            code="folder_not_empty",
            where=str(folder),
            remedy="name another one: armature setup --folder .venv-vllm",
        )
    try:
        set_up("vllm", folder.absolute())
    except (subprocess.CalledProcessError, OSError) as error:
        raise ArmatureError(
            f"the environment could not be made: {error}",
            code="environment_not_made",
            where=str(folder),
            remedy="correct the problem that the lines above show, then run `armature setup` again",
        ) from error
