"""One game played in AI2-THOR."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import ActionDefect, Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.alfworld.names import names_of
from armature.components.environments.alfworld.prompts import EpisodePrompts, PromptSettings, parse_action
from armature.components.environments.alfworld.thor.pool import ThorPlayerPool
from armature.components.environments.alfworld.thor.rewards import PotentialReward, RewardTracker, TerminalReward
from armature.components.environments.alfworld.thor.trajectory import thor_game

if TYPE_CHECKING:
    from armature.components.environments.alfworld.thor.agent import ThorAgent
    from armature.components.environments.alfworld.thor.player import ThorPlayer


class ThorEpisode:
    """Blocks: it waits for a player, and for each of the player's answers.

    Raises:
        DataError: the task is not a game with its scene.
        PlayerError: in `reset` and `step`, the player failed; it is not used again.
        ConfigurationError: in `reset`, a player cannot be started here.
    """

    def __init__(
        self, task: Task, prompt: PromptSettings, reward: TerminalReward | PotentialReward, players: ThorPlayerPool
    ) -> None:
        self._game = thor_game(task)
        self._prompt, self._reward, self._players = prompt, reward, players
        self._player: ThorPlayer | None = None
        self._usable = False
        self._agent: ThorAgent
        self._dialogue: EpisodePrompts
        self._earned: RewardTracker

    async def reset(self) -> Observation:
        self._player = player = self._players.take()
        game = self._game
        self._agent = player.begin(game.trajectory.model_dump(), game.goal, names_of(game.problem))
        self._dialogue = EpisodePrompts(self._prompt, self._agent.feedback)
        self._earned = RewardTracker(self._reward, player.goal_share())
        observation = self._observation(player)
        self._usable = True
        return observation

    async def step(self, answer: str) -> Outcome:
        player = self._player
        assert player is not None, "an episode is reset before it is stepped"
        projection = parse_action(answer, self._prompt.thinking)
        self._usable = False
        _, admissible = self._agent.act(projection.action)
        self._dialogue.acted(projection.action, self._agent.feedback)
        share, won = player.goal_share(), bool(player.get_goal_satisfied())
        observation = None if won else self._observation(player)
        self._usable = True
        defect: ActionDefect | None = None
        if projection.defect or not admissible:
            defect = "format" if projection.defect else "inadmissible"
        return Outcome(observation, self._earned.turn(share, won), defect)

    async def close(self) -> None:
        if self._player is not None:
            self._players.give_back(self._player, self._usable)
            self._player = None

    def _observation(self, player: ThorPlayer) -> Observation:
        actions = tuple(self._agent.get_admissible_commands())
        content = (encode_frame(player.frame()), self._dialogue.text(actions))
        return Observation(content, admissible_actions=actions, anchor_key=self._dialogue.observation)


def encode_frame(frame: np.ndarray) -> EncodedImage:
    """(height, width, 3) uint8 in the order red, green, blue, as PNG."""
    return encode_png(Image.fromarray(np.ascontiguousarray(frame)))
