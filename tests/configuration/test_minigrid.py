"""train-vlm/minigrid-tiny: a planner that knows the whole room reaches the named object within the recipe's turns."""

from __future__ import annotations

import pytest

from armature.components.configuration import load_recipe
from armature.components.environments.gymnasium.settings import GymnasiumSettings


def test_named_object_is_reached_within_the_turns() -> None:
    pytest.importorskip("minigrid")
    import gymnasium
    from minigrid.utils.baby_ai_bot import BabyAIBot

    args = GymnasiumSettings.model_validate(load_recipe("train-vlm/minigrid-tiny").sections["environment"].args)
    env = gymnasium.make(args.id, render_mode="rgb_array", **args.make)
    for seed in range(1, 128, 2):
        env.reset(seed=seed)
        assert env.render().shape == (40, 40, 3), "five tiles of eight pixels, as the agent sees them"
        bot, action, ended, reward = BabyAIBot(env), None, False, 0.0
        for _ in range(args.max_turns):
            action = bot.replan(action)
            assert int(action) < 3, "left, right and forward are enough"
            _, reward, ended, _, _ = env.step(action)
            if ended:
                break
        assert ended and reward > 0, f"room {seed}"
