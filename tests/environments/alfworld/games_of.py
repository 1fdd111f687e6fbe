"""Settings of small ALFWorld games and prompts."""

from __future__ import annotations

from typing import Any

from armature.components.environments.alfworld.games.game import GeneratedGames

GAMES: dict[str, Any] = {"source": "generated", "density": 0.4, "most_receptacles": 6}
PROMPT: dict[str, Any] = {
    "first": "{room}\nGoal: {task}\n{actions}",
    "later": "{history}\nNow: {observation}\nGoal: {task}\n{actions}",
    "past": "{step}. {observation} > {action}",
    "action": "{action}",
    "action_separator": ", ",
    "thinking": False,
    "answer": "<action>{action}</action>",
}
TEXT: dict[str, Any] = {
    "games": GAMES,
    "heldout_source": "valid_unseen",
    "prompt": PROMPT,
    "image": {"form": "schematic", "image_size": 56},
    "max_turns": 14,
    "detours": 0,
}


def generated(**changes: Any) -> GeneratedGames:
    return GeneratedGames.model_validate({**GAMES, **changes})
