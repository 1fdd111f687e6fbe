"""Remember a picture that was shown some turns ago: the images of earlier turns must stay in the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from components.contracts.episodes import Observation, Outcome, Task
from components.contracts.images import EncodedImage
from components.environments.generated import GeneratedEnvironment
from components.environments.pictures import PictureSettings, colour_reward, painter

NUMBER = "{number}"


class RecallSettings(PictureSettings):
    """Turns that show a picture, then turns that show none, then the question."""

    pictures: PositiveInt = Field(1, description="Turns that show a picture, each of another colour.")
    filler_turns: NonNegativeInt = Field(
        0, description="Turns without a picture between the last one and the question."
    )
    asked: Literal["first", "last", "random"] = Field("first", description="Which picture's colour is asked for.")
    remember: str = Field(
        "Remember this picture.", min_length=1, description="Said below a picture; {number} is the picture's number."
    )
    filler: str = Field("Go on.", min_length=1, description="Said in a turn without a picture.")
    question: str = Field(
        "Which colour was it?",
        min_length=1,
        description="The last turn; {number} is the number of the picture asked for.",
    )
    correct_weight: float = Field(1.0, description="Reward for answering with exactly the colour's name.")
    format_weight: float = Field(0.0, description="Reward for answering with exactly one of the colours' names.")

    @model_validator(mode="after")
    def _can_be_answered(self) -> Self:
        if self.pictures > len(self.colours):
            raise ValueError(
                f"{self.pictures} pictures of different colours need more than {len(self.colours)} colours"
            )
        if self.pictures > 1 and self.asked == "random" and NUMBER not in self.question:
            raise ValueError(f"the question does not say which picture it asks for: put {NUMBER} into it")
        return self


class Recall(GeneratedEnvironment[RecallSettings]):
    """The colour asked for is drawn evenly, the others without replacement; only the last turn is rewarded.

    A guess is right one time in `len(colours)`; who saw the pictures but not which one is asked for is right
    one time in `pictures`.
    """

    name = "recall"
    Settings = RecallSettings

    def __init__(
        self, settings: RecallSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        super().__init__(settings, train_tasks=train_tasks, heldout_tasks=heldout_tasks, seed=seed, processes=processes)
        self.max_turns = settings.pictures + settings.filler_turns + 1
        self.reward_weights = {"correct": settings.correct_weight, "format": settings.format_weight}
        self._paint = painter(settings)

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        names, pictures = self.settings.names, self.settings.pictures
        choices = {"first": 0, "last": pictures - 1, "random": int(random.integers(pictures))}
        asked = choices[self.settings.asked]
        answer = names[index % len(names)]
        colours = [str(name) for name in random.permutation([name for name in names if name != answer])]
        return {"colours": [*colours[:asked], answer, *colours[asked : pictures - 1]], "asked": asked, "seed": seed}

    def episode(self, task: Task) -> RecallEpisode:
        return RecallEpisode(task, self.settings, self._paint)


class RecallEpisode:
    def __init__(self, task: Task, settings: RecallSettings, paint: Callable[[str, int], EncodedImage]) -> None:
        self._colours: list[str] = task.payload["colours"]
        self._asked: int = task.payload["asked"]
        self._seed: int = task.payload["seed"]
        self._settings, self._paint = settings, paint
        self._turn = 0

    async def reset(self) -> Observation:
        self._turn = 0
        return self._observation()

    async def step(self, action: str) -> Outcome:
        if self._turn == self._settings.pictures + self._settings.filler_turns:
            return Outcome(None, colour_reward(action, self._colours[self._asked], self._settings))
        self._turn += 1
        return Outcome(self._observation())

    async def close(self) -> None:
        pass

    def _observation(self) -> Observation:
        settings, turn = self._settings, self._turn
        if turn < settings.pictures:
            picture = self._paint(self._colours[turn], self._seed + turn * 2**64)
            return Observation((picture, settings.remember.replace(NUMBER, str(turn + 1))))
        if turn < settings.pictures + settings.filler_turns:
            return Observation((settings.filler,))
        return Observation((settings.question.replace(NUMBER, str(self._asked + 1)),))
