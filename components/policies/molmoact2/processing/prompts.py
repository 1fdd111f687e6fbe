"""The words around a robot's cameras and state."""

from __future__ import annotations

from typing import Literal


def wrap(text: str, kind: Literal["setup", "control"], enabled: bool) -> str:
    """`text` between the tokens of its kind, unless it is empty, wrapped already, or they are not wanted."""
    start, end = f"<{kind}_start>", f"<{kind}_end>"
    if not text or not enabled or (text.startswith(start) and text.endswith(end)):
        return text
    return f"{start}{text}{end}"


def image_labels(count: int) -> tuple[str, ...]:
    """What stands before each of `count` images."""
    return ("",) if count == 1 else tuple(f"Image {number}" for number in range(1, count + 1))


def instruction(task: str, setup: str, control: str) -> tuple[str, str]:
    """The user's turn, and the beginning of the answer, before the state tokens and after them.

    The images stand before the turn. `setup` and `control` are wrapped already.
    """
    before = f"<|im_start|>user\nThe task is to {task}. The setup is {setup}. The current state of the robot is "
    after = (
        f". The expected control mode is {control}. Given these, what action should the robot take to complete "
        "the task?<|im_end|>\n<|im_start|>assistant\n<action_output>"
    )
    return before, after
