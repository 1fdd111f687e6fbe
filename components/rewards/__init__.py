"""The registry of rewards. A reward maps a completion and the answer of its task to a number.

To add a reward, write a class in one file and add a line here, or register an entry point in the same group.
"""

from __future__ import annotations

from armature.components.machine.registry import Registry

REWARDS = Registry(
    "reward",
    "armature.rewards",
    {
        "box_iou": "armature.components.rewards.boxes:BoxIoU",
        "choice": "armature.components.rewards.choice:Choice",
        "command": "armature.components.rewards.function:Command",
        "exact_match": "armature.components.rewards.text:ExactMatch",
        "format_tags": "armature.components.rewards.text:FormatTags",
        "function": "armature.components.rewards.function:Function",
        "json_schema": "armature.components.rewards.json_schema:JsonSchema",
        "judge": "armature.components.rewards.judge.judge:Judge",
        "length": "armature.components.rewards.text:Length",
        "math": "armature.components.rewards.mathematics:Math",
        "number": "armature.components.rewards.number:Number",
        "point_in_box": "armature.components.rewards.boxes:PointInBox",
        "regex": "armature.components.rewards.text:Regex",
    },
)
