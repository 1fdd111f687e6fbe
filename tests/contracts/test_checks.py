"""Earlier messages of an observation are checked like everything else that an environment gives."""

from __future__ import annotations

import pytest

from armature.components.contracts.checks import checked_observation
from armature.components.contracts.episodes import EarlierMessage, Observation
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.images import EncodedImage
from tests.refusals import refused

IMAGE = EncodedImage(b"x", "image/png")


def test_valid_messages_are_copied():
    earlier = (
        EarlierMessage("system", ("a",)),
        EarlierMessage("user", (IMAGE, "b")),
        EarlierMessage("assistant", ("c",)),
    )
    assert checked_observation(Observation(("d",), earlier=earlier)) == Observation(("d",), earlier=earlier)


@pytest.mark.parametrize(
    ("earlier", "reason"),
    [
        ("text", "environment_error"),
        ([{"role": "user", "content": "a"}], "environment_error"),
        ([EarlierMessage("tool", ("a",))], "environment_error"),  # type: ignore[arg-type]
        ([EarlierMessage(None, ("a",))], "environment_error"),  # type: ignore[arg-type]
        ([EarlierMessage("user", "text")], "environment_error"),  # type: ignore[arg-type]
        ([EarlierMessage("assistant", (IMAGE,))], "environment_error"),
        ([EarlierMessage("user", ("\ud800",))], "bad_text"),
        ([EarlierMessage("user", ("x" * 2**22,)), EarlierMessage("user", ("x",))], "environment_error"),
    ],
)
def test_invalid_messages_fail_the_rollout(earlier, reason):
    with refused(reason, kind=RolloutFailed):
        checked_observation(Observation(("a",), earlier=earlier))
