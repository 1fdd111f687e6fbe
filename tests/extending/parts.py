"""One part of each kind, as a package outside of Armature adds it.

    [project.entry-points."armature.families"]
    vipllava = "parts:VIPLLAVA"

    [project.entry-points."armature.environments"]
    parity = "parts:Parity"

    [project.entry-points."armature.stages"]
    count = "parts:COUNT_STAGE"

A reward, an objective and a policy need no entry point: a recipe names the functions as "parts:digits" and
"parts:reinforce", and a policy is passed as an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from armature import GeneratedEnvironment, Observation, Outcome, RobotObservation, Settings, Task, encode_png
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.families.llava import LLAVA
from armature.components.families.tiny import TinySettings


# A model family: LLaVA, whose projector reads several layers of the vision tower.
def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import VipLlavaConfig

    assert LLAVA.tiny is not None
    llava = LLAVA.tiny.config(settings, tokenizer)
    return VipLlavaConfig(
        vision_config=llava.vision_config,
        text_config=llava.text_config,
        image_token_index=llava.image_token_index,
        image_seq_length=llava.image_seq_length,
        vision_feature_layers=[-1, -2],
        tie_word_embeddings=llava.tie_word_embeddings,
    )


VIPLLAVA = replace(
    LLAVA,
    name="vipllava",
    model_type="vipllava",
    tiny=replace(LLAVA.tiny, config=_config) if LLAVA.tiny is not None else None,
)


# An environment.
class ParitySettings(Settings):
    largest: int = Field(9, ge=1, description="Numbers are drawn from 0 to this one.")


class Parity(GeneratedEnvironment[ParitySettings]):
    """An environment that shows a number and asks if it is even or odd."""

    name = "parity"
    Settings = ParitySettings
    max_turns = 1
    reward_weights: Mapping[str, float] = {"correct": 1.0}

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"number": index % (self.settings.largest + 1)}

    def episode(self, task: Task) -> ParityEpisode:
        return ParityEpisode(task.payload["number"])


class ParityEpisode:
    def __init__(self, number: int) -> None:
        self.number = number

    async def reset(self) -> Observation:
        image = Image.new("L", (28, 28), self.number * 20)
        return Observation((encode_png(image), f"Is {self.number} even or odd?"))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, {"correct": float(action.strip() == ("odd" if self.number % 2 else "even"))})

    async def close(self) -> None:
        pass


# A reward.
def digits(completion: str, answer: str) -> float:
    """Return the fraction of the answer's digits that occur in the completion."""
    return sum(digit in completion for digit in answer) / len(answer)


# An objective.
def reinforce(tokens: Any, baseline: float = 0.0) -> Any:
    """Return the loss of each token, loss_t = -(A_t - baseline) lp_t, where lp_t is the token's log-prob."""
    return -(tokens.advantages - baseline) * tokens.logprobs


# A stage.
class CountSettings(Settings):
    at_least: int = Field(0, description="Lines with fewer characters are left out.")


def count(settings: CountSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext) -> StageReport:
    lines = (inputs["text"].path / "text.txt").read_text().splitlines()
    saved = [line for line in lines if len(line) >= settings.at_least]
    (out / "count.txt").write_text(str(len(saved)))
    return StageReport(rows={"lines": len(saved)}, drops={"short": len(lines) - len(saved)})


COUNT_STAGE = Stage(name="count", version=1, settings=CountSettings, inputs=("text",), run=count)


# A robot policy, to be evaluated.
class Still:
    """A robot policy whose actions are always zeros."""

    n_action_steps = 4
    action_dimensions = 7
    rows_per_pass = 8

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        return np.zeros((len(observations), self.n_action_steps, self.action_dimensions), np.float32)

    def facts(self) -> dict[str, Any]:
        return {"policy": "still"}
