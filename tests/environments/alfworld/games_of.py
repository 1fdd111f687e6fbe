"""Small settings and a way to run coroutines against a few shared worker processes."""

from __future__ import annotations

from typing import Any

from armature.components.environments.alfworld.games.game import KINDS, GeneratedGames

GAMES: dict[str, Any] = {
    "source": "generated",
    "kinds": list(KINDS),
    "rooms": ["Kitchen", "LivingRoom", "Bedroom", "Bathroom"],
    "density": 0.4,
    "most_instances": 2,
    "most_receptacles": 6,
}
PROMPT: dict[str, Any] = {
    "first": "{room}\nGoal: {task}\n{actions}",
    "later": "{history}\nNow: {observation}\nGoal: {task}\n{actions}",
    "past": "{step}. {observation} > {action}",
    "past_separator": "\n",
    "action": "{action}",
    "action_separator": ", ",
    "history_length": 2,
    "invalid_actions": "shown",
    "thinking": False,
    "answer": "<action>{action}</action>",
}
TEXT: dict[str, Any] = {
    "games": GAMES,
    "heldout_source": "valid_unseen",
    "prompt": PROMPT,
    "image": {"form": "schematic", "image_size": 56},
    "max_turns": 14,
    "won_weight": 10.0,
    "detours": 0,
    "max_invalid_actions": 0,
}


def generated(**changes: Any) -> GeneratedGames:
    return GeneratedGames.model_validate({**GAMES, **changes})
