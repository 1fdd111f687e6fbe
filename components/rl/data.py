"""The data of `MultimodalGRPOTrainer`: rows and reward functions of a program, as an environment of one-turn tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from armature.components.contracts.episodes import Environment
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.environments.dataset.python_rows import IMAGE_COLUMNS, PROMPT, WrittenRows, write_rows
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings, HashSplit, NameSplit
from armature.components.rewards.callables import CallableReward
from armature.components.rewards.reward import RewardSettings

ANSWERS = ("answer", "solution", "label")
"""Names of the columns that may hold the right answer; the first one that the rows have is used."""


class _RowSettings(DatasetEnvironmentSettings):
    rewards: tuple[RewardSettings, ...] = ()
    """Settings of the rewards that have a name. Empty if all rewards are functions of the program."""


@dataclass(frozen=True)
class ProgramData:
    """Rows to train on and to evaluate with, and their rewards; see `MultimodalGRPOTrainer` for the fields.

    Raises:
        ConfigurationError: there is no reward, weights do not fit rewards, or two sources of held-out rows are set.
    """

    train: Any
    heldout: Any
    heldout_fraction: float
    rewards: Sequence[Any]
    weights: Sequence[float]
    prompt: str

    def __post_init__(self) -> None:
        if self.heldout is not None and self.heldout_fraction:
            raise ConfigurationError(
                "held-out rows come from eval_dataset or from eval_fraction, not from both",
                code="heldout_rows_twice",
                where="MultimodalGRPOTrainer",
            )
        if not self.rewards or len(self.rewards) != len(self.weights):
            raise ConfigurationError(
                f"there are {len(self.rewards)} rewards and {len(self.weights)} weights",
                code="reward_missing",
                where="reward_funcs, reward_weights",
                remedy="pass a function, a reward's name such as 'exact_match', or a list of both, and a weight for "
                "each or none",
            )

    @property
    def has_heldout_rows(self) -> bool:
        """True if there are rows to evaluate with."""
        return self.heldout is not None or self.heldout_fraction > 0

    def write(self, folder: Path, most: int | None) -> WrittenData:
        """Write the rows to `folder`; see `write_rows`.

        If the training rows do not have a length, only the first `most` rows are taken.

        Raises:
            ConfigurationError: training rows have no length, and `most` is None.
        """
        has_length = isinstance(self.train, Path) or hasattr(self.train, "__len__")
        if most is None and not has_length:
            raise ConfigurationError(
                "rows without a length do not tell how many steps one pass over them takes",
                code="steps_unknown",
                where="train_dataset",
                remedy="set max_steps in config",
            )
        train = write_rows(self.train, folder, "train", None if has_length else most)
        heldout = write_rows(() if self.heldout is None else self.heldout, folder, "heldout")
        return WrittenData(self, folder, train, max(train.most_images, heldout.most_images))


@dataclass(frozen=True)
class WrittenData:
    """Rows that were written to a folder, and from which environments are made."""

    data: ProgramData
    folder: Path
    train: WrittenRows
    most_images: int
    """Largest number of images in a row for training or evaluation."""

    @cached_property
    def settings(self) -> DatasetEnvironmentSettings:
        """The settings of the environment `dataset` for these rows.

        Raises:
            ConfigurationError: no prompt is known.
        """
        columns = self.train.columns
        if not self.data.prompt and PROMPT not in columns:
            raise ConfigurationError(
                f"the rows have no column 'prompt', but {', '.join(columns) or 'no columns'}",
                code="prompt_missing",
                where="train_dataset",
                remedy='pass prompt="How many? {question}", in which {question} is the value of a column',
            )
        is_chat = self.train.chat and not self.data.prompt
        split: NameSplit | HashSplit = NameSplit(by="name", train=("train.jsonl",), heldout=("heldout.jsonl",))
        if share := self.data.heldout_fraction:
            split = HashSplit(by="hash", heldout=share, of=("train.jsonl",))
        return _RowSettings(
            source=str(self.folder.absolute() / "*.jsonl"),
            prompt="" if is_chat else self.data.prompt or f"{{{PROMPT}}}",
            conversation=PROMPT if is_chat else "",
            images=tuple(name for name in IMAGE_COLUMNS if name in columns),
            answer=next((name for name in ANSWERS if name in columns), ""),
            split=split,
            rewards=tuple(
                RewardSettings(weight=weight, **_named(reward))
                for reward, weight in zip(self.data.rewards, self.data.weights, strict=True)
                if isinstance(reward, str)
            ),
        )

    @cached_property
    def callables(self) -> list[CallableReward]:
        """The rewards that are functions of the program.

        Raises:
            ConfigurationError: a function has a signature that no reward has.
        """
        columns = set(self.train.columns) - set(IMAGE_COLUMNS)
        return [
            CallableReward(reward, weight=weight, columns=columns, chat=bool(self.settings.conversation))
            for reward, weight in zip(self.data.rewards, self.data.weights, strict=True)
            if not isinstance(reward, str)
        ]

    @property
    def sources(self) -> dict[str, str]:
        """Digests by name of the rows, their images, and the code of the rewards.

        The digest of a reward that is a function covers its source text.
        """
        digests = DatasetEnvironment.sources(self.settings)
        return digests | {name: digest for each in self.callables for name, digest in each.sources.items()}

    def environment(self, seed: int, heldout_tasks: int, processes: int) -> Environment:
        """Return an environment with a task for each row, of which at most `heldout_tasks` are held out."""
        made: Any = DatasetEnvironment(
            self.settings,
            train_tasks=None,
            heldout_tasks=heldout_tasks if self.data.has_heldout_rows else 0,
            seed=seed,
            processes=processes,
            callables=self.callables,
        )
        return made


def _named(reward: str) -> dict[str, Any]:
    """Return the settings of the reward with the name `reward`, which is MODULE:FUNCTION for a function."""
    return {"name": "function", "function": reward} if ":" in reward else {"name": reward}
