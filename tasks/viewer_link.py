"""Where the curves and the rollouts of a stage are looked at, said on the run's page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from armature.components.view.address import viewer_address


def link_viewer(label: str, fingerprint: str, store: Path) -> None:
    """Say how to look at a stage, called `label`, while it runs, with a link to it where a viewer of `store` is up.

    The link has no token, for every user of the Prefect server reads it: the page asks a browser that has none.
    """
    command = f"armature view --store {shlex.quote(str(store))}"
    said = f"`{command}` shows the curves and every rollout of **{label}**, also while it runs."
    if (address := viewer_address(store)) is not None:
        link = f"[Curves and rollouts of **{label}**]({address}?run={fingerprint[:12]})"
        said = f"{link}\n\nThe page asks for the token that `armature view` printed, once. After it ended: {said}"
    key = re.sub("[^a-z0-9]+", "-", f"rollouts {label}".lower()).strip("-")
    create_markdown_artifact(f"{said}\n", key=key)
