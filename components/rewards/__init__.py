"""Rewards by name: what a completion is worth, given the answer of its task.

A new one is a class in one file and a line here, or an entry point of the same group.
"""

from __future__ import annotations

from components.registry import Registry

REWARDS = Registry(
    "reward",
    "armature.rewards",
    {
        "box_iou": "components.rewards.boxes:BoxIoU",
        "choice": "components.rewards.choice:Choice",
        "command": "components.rewards.command:Command",
        "exact_match": "components.rewards.exact_match:ExactMatch",
        "format_tags": "components.rewards.form:FormatTags",
        "function": "components.rewards.function:Function",
        "json_schema": "components.rewards.json_schema:JsonSchema",
        "judge": "components.rewards.judge.judge:Judge",
        "length": "components.rewards.form:Length",
        "math": "components.rewards.mathematics:Math",
        "number": "components.rewards.number:Number",
        "point_in_box": "components.rewards.boxes:PointInBox",
        "regex": "components.rewards.regex:Regex",
    },
)
