"""`armature export`: a robot policy in LeRobot's layout."""

from __future__ import annotations

from pathlib import Path

from components.contracts.errors import ConfigurationError


def export_policy(source: Path, out: Path, base: str) -> Path:
    """Write the policy of the artifact or checkpoint folder `source` to the new folder `out`.

    Args:
        base: hub name or folder of the released checkpoint, from which LeRobot takes tokenizer and image processor.

    Raises:
        ConfigurationError: `out` exists, or the policy knows no statistics or cameras.
        DataError: `source` holds no policy.
    """
    from components.policies.molmoact2.checkpoints.checkpoint import load_policy, save_lerobot

    if out.exists():
        raise ConfigurationError("there is something already", where=str(out), remedy="name a folder to be made")
    loaded = load_policy(source)
    return save_lerobot(out, loaded.parts, loaded.model.state_dict(), base)
