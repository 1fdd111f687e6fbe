"""The data of `MultimodalGRPOTrainer`: rows and reward functions of a program, as an environment of one-turn tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from armature.components.configuration.problems import explained
from armature.components.contracts.episodes import Environment
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.environments.dataset.python_rows import (
    IMAGE_COLUMNS,
    PROMPT,
    WrittenRows,
    describe_rows,
    write_rows,
)
from armature.components.environments.dataset.select import check_columns
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings, HashSplit, NameSplit
from armature.components.environments.mixture import PART_NAME, EnvironmentMixture, MixturePart, one_pass
from armature.components.rewards.callables import SIGNATURES, CallableReward
from armature.components.rewards.function import parameters_of
from armature.components.rewards.make import refuse_equal_labels, refuse_missing_answer, reward_sources
from armature.components.rewards.reward import RewardSettings

ANSWERS = ("answer", "solution", "label")
"""Names of the columns that may hold the right answer; the first one that the rows have is used."""


class _RowSettings(DatasetEnvironmentSettings):
    rewards: tuple[RewardSettings, ...] = ()
    """Settings of the rewards that are named by a text. Empty if the caller passes all rewards as Python functions."""


@dataclass(frozen=True)
class ProgramData:
    """Rows to train on and to evaluate with, and their rewards; see `MultimodalGRPOTrainer` for the fields.

    Raises:
        ConfigurationError: there is no reward, weights do not fit rewards, two sources of held-out rows are set, or a
            number is out of bounds.
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
        _check_number("eval_fraction", self.heldout_fraction, 0.0, 1.0)
        for weight in self.weights:
            _check_number("reward_weights", weight, -math.inf, math.inf)

    @property
    def has_heldout_rows(self) -> bool:
        """True if there are rows to evaluate with."""
        return self.heldout is not None or self.heldout_fraction > 0

    @property
    def has_length(self) -> bool:
        """True if the number of training rows is known without reading them all as they pass."""
        return isinstance(self.train, Path) or hasattr(self.train, "__len__")

    def refuse_ahead(self, most: int | None, reward_key: str | None) -> None:
        """Check what can be known of rows and rewards without writing rows, fetching a source or starting a process.

        Args:
            most: see `write`.
            reward_key: label of the only reward to train on; None: the sum of all.

        Raises:
            ConfigurationError, DataError: `write`, the rows' `settings`, their `callables` or rewards would fail.
        """
        train = describe_rows(self.train, "train")
        heldout = None if self.heldout is None else describe_rows(self.heldout, "heldout")
        if most is None and not self.has_length:
            raise ConfigurationError(
                "rows without a length do not tell how many steps one pass over them takes",
                code="steps_unknown",
                where="train_dataset",
                remedy="set max_steps in config",
            )
        _refuse_no_rows(train, heldout)
        taken = [parameters_of(each, repr(each), SIGNATURES) for each in self.rewards if not isinstance(each, str)]
        # Rows that have not been read may have any column: those that the functions name, and the prompt's.
        columns = {PROMPT, *(each.name for parameters in taken for each in parameters)}
        written = WrittenData(self, Path(), train or WrittenRows(1, tuple(sorted(columns)), False, 0, ()), 0)
        for rows, argument in ((train, "train_dataset"), (train and heldout, "eval_dataset")):
            if rows is not None:
                check_columns(written.settings, set(rows.columns), argument)
        if train is not None and not (written.settings.answer or written.settings.conversation):
            remedy = f"rename the column with the right answer to {' or '.join(map(repr, ANSWERS))}"
            refuse_missing_answer(written.settings.rewards, Path(), "train_dataset", remedy)
        labels = [*(each.part for each in written.settings.rewards), *(each.part for each in written.callables)]
        refuse_equal_labels(labels)
        if reward_key is not None and reward_key not in labels:
            raise unknown_reward_part(reward_key, labels)
        reward_sources(written.settings.rewards)

    def write(self, folder: Path, most: int | None) -> WrittenData:
        """Write the rows to `folder`; see `write_rows`.

        If the training rows do not have a length, only the first `most` rows are taken.

        Raises:
            ConfigurationError: there are no rows.
        """
        train = write_rows(self.train, folder, "train", None if self.has_length else most)
        heldout = write_rows(() if self.heldout is None else self.heldout, folder, "heldout")
        _refuse_no_rows(train, None if self.heldout is None else heldout)
        return WrittenData(self, folder, train, max(train.most_images, heldout.most_images))


@dataclass(frozen=True)
class WrittenData:
    """Rows that were written to a folder, and from which environments are made."""

    data: ProgramData
    folder: Path
    train: WrittenRows
    most_images: int
    """Largest number of images in a row for training or evaluation."""
    reserved_tokens: tuple[str, ...] = ()
    """Texts that no row may contain: the model's special tokens."""

    @cached_property
    def settings(self) -> DatasetEnvironmentSettings:
        """The settings of the environment `dataset` for these rows.

        Raises:
            ConfigurationError: no prompt is known, images are in columns of other names, or a reward needs arguments.
        """
        columns = self.train.columns
        if not self.data.prompt and PROMPT not in columns:
            raise ConfigurationError(
                f"the rows have no column 'prompt', but {', '.join(columns) or 'no columns'}",
                code="prompt_missing",
                where="train_dataset",
                remedy='pass prompt="How many? {question}", in which {question} is the value of a column',
            )
        images = tuple(name for name in IMAGE_COLUMNS if name in columns)
        if (others := self.train.other_images) and not images:
            raise ConfigurationError(
                f"there are images in {', '.join(others)}, but only those in {' and '.join(IMAGE_COLUMNS)} are shown",
                code="image_column_unknown",
                where="train_dataset",
                remedy=f"rename {others[0]!r} to 'image', or remove it",
            )
        is_chat = self.train.chat and not self.data.prompt
        split: NameSplit | HashSplit = NameSplit(by="name", train=("train.jsonl",), heldout=("heldout.jsonl",))
        if share := self.data.heldout_fraction:
            split = HashSplit(by="hash", heldout=share, of=("train.jsonl",))
        named = [pair for pair in zip(self.data.rewards, self.data.weights, strict=True) if isinstance(pair[0], str)]
        remedy = "pass a function, or the name of a reward that needs no arguments; docs/rewards.md lists them"
        with explained(RewardSettings, "reward_funcs", remedy=remedy):
            rewards = tuple(RewardSettings(weight=weight, **_named(reward)) for reward, weight in named)
        with explained(_RowSettings, "MultimodalGRPOTrainer"):
            return _RowSettings(
                source=str(self.folder.absolute() / "*.jsonl"),
                prompt="" if is_chat else self.data.prompt or f"{{{PROMPT}}}",
                reserved_tokens=self.reserved_tokens,
                conversation=PROMPT if is_chat else "",
                images=images,
                answer=next((name for name in ANSWERS if name in columns), ""),
                split=split,
                rewards=rewards,
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
    def pass_length(self) -> int:
        """Number of training tasks that one pass has, about, because a share of held-out rows is chosen by hash."""
        return ceil(self.train.count * (1 - self.data.heldout_fraction))

    @property
    def played(self) -> dict[str, Any]:
        """The settings on which tasks and rewards depend. Rows and the code of rewards are not among them."""
        settings = self.settings.model_dump(mode="json", exclude={"source", "reserved_tokens"})
        return settings | {"weights": list(self.data.weights)}

    def reserving(self, tokens: tuple[str, ...]) -> WrittenData:
        """Return the data, whose texts may not contain the special tokens `tokens`."""
        return replace(self, reserved_tokens=tokens)

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


@dataclass(frozen=True)
class MixedData:
    """Several datasets by name, from which training tasks are taken in proportion to `shares`."""

    parts: Mapping[str, ProgramData]
    shares: Mapping[str, float]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or self.parts.keys() != self.shares.keys():
            raise ConfigurationError(
                f"there are datasets {', '.join(map(repr, self.parts)) or '(none)'} and weights for "
                f"{', '.join(map(repr, self.shares)) or '(none)'}",
                code="datasets_do_not_fit",
                where="train_dataset, dataset_weights",
                remedy="pass two or more datasets by name, and a weight for each or none",
            )
        for name, share in self.shares.items():
            if not re.fullmatch(PART_NAME, str(name)):
                raise ConfigurationError(
                    f"{name!r} cannot be the name of a dataset",
                    code="dataset_name_invalid",
                    where="train_dataset",
                    remedy="use letters, digits and _ . -",
                )
            _check_number("dataset_weights", share, math.ulp(0.0), math.inf)

    @property
    def has_heldout_rows(self) -> bool:
        """True if there are rows to evaluate with."""
        return any(part.has_heldout_rows for part in self.parts.values())

    def refuse_ahead(self, most: int | None, reward_key: str | None) -> None:
        """Check each dataset; see `ProgramData.refuse_ahead`."""
        for part in self.parts.values():
            part.refuse_ahead(most, reward_key)

    def write(self, folder: Path, most: int | None) -> WrittenParts:
        """Write each dataset to a folder of its own; see `ProgramData.write`.

        Raises:
            ConfigurationError: there are no rows.
        """
        return WrittenParts({name: part.write(folder / name, most) for name, part in self.parts.items()}, self.shares)


@dataclass(frozen=True)
class WrittenParts:
    """Several datasets that were written to folders. It has the attributes of `WrittenData`."""

    parts: Mapping[str, WrittenData]
    shares: Mapping[str, float]

    @property
    def callables(self) -> list[CallableReward]:
        return [each for part in self.parts.values() for each in part.callables]

    @property
    def most_images(self) -> int:
        return max(part.most_images for part in self.parts.values())

    @property
    def pass_length(self) -> int:
        return one_pass({name: part.pass_length for name, part in self.parts.items()}, self.shares)

    @property
    def played(self) -> dict[str, Any]:
        return {name: part.played | {"share": self.shares[name]} for name, part in self.parts.items()}

    def reserving(self, tokens: tuple[str, ...]) -> WrittenParts:
        return replace(self, parts={name: part.reserving(tokens) for name, part in self.parts.items()})

    @property
    def sources(self) -> dict[str, str]:
        digests = {name: part.sources for name, part in self.parts.items()}
        return {f"{name}/{source}": digest for name, each in digests.items() for source, digest in each.items()}

    def environment(self, seed: int, heldout_tasks: int, processes: int) -> Environment:
        most = ceil(heldout_tasks / len(self.parts))
        made = {name: part.environment(seed, most, processes) for name, part in self.parts.items()}
        return EnvironmentMixture(
            {name: MixturePart(environment, self.shares[name]) for name, environment in made.items()}
        )


def _named(reward: str) -> dict[str, Any]:
    """Return the settings of the reward with the name `reward`, which is MODULE:FUNCTION for a function."""
    return {"name": "function", "function": reward} if ":" in reward else {"name": reward}


def _check_number(name: str, value: Any, least: float, below: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value < below:
        raise ConfigurationError(
            f"{value!r} is not a number from {least:g} to below {below:g}", code="number_out_of_bounds", where=name
        )


def _refuse_no_rows(train: WrittenRows | None, heldout: WrittenRows | None) -> None:
    """Check that there are rows to train on, and to evaluate with if they are passed; None if nothing is known."""
    for rows, argument in ((train, "train_dataset"), (heldout, "eval_dataset")):
        if rows is not None and not rows.count:
            raise ConfigurationError(
                "there are no rows", code="rows_missing", where=argument, remedy="pass one or more"
            )


def _is_table(values: Mapping[str, Any]) -> bool:
    """Return True if the values of a dict are the columns of one table, or the values of one row, and not datasets."""
    lists = [each for each in values.values() if isinstance(each, list | tuple | np.ndarray | pd.Series)]
    in_row = isinstance(values.get(PROMPT), str) or any(isinstance(each, Image.Image) for each in values.values())
    return in_row or any(not isinstance(next(iter(each)), Mapping) for each in lists if len(each))


def program_data(
    train: Any, heldout: Any, heldout_fraction: float, rewards: Any, weights: Any, prompt: str, shares: Any
) -> ProgramData | MixedData | None:
    """Return the data in the arguments of `MultimodalGRPOTrainer`; None without a dataset.

    Raises:
        ConfigurationError: there are rewards, held-out rows or a prompt without a dataset; see also `ProgramData`.
    """
    if train is not None:
        rewards = rewards if isinstance(rewards, list | tuple) else [] if rewards is None else [rewards]
        weights = [1.0] * len(rewards) if weights is None else weights
        weights = list(weights) if isinstance(weights, Iterable) else [weights]
        if type(train) is not dict:  # a `datasets.DatasetDict` is one dataset with splits
            if shares is not None:
                raise ConfigurationError(
                    "dataset_weights are of several datasets",
                    code="datasets_do_not_fit",
                    where="dataset_weights",
                    remedy='pass train_dataset={"NAME": rows, ...}',
                )
            return ProgramData(train, heldout, heldout_fraction, rewards, weights, prompt)
        if _is_table(train):
            raise ConfigurationError(
                f"a dict has several datasets by name, and this one has {', '.join(map(repr, train))}",
                code="columns_not_datasets",
                where="train_dataset",
                remedy="for the columns of one table pass datasets.Dataset.from_dict(...) or pandas.DataFrame(...), "
                "for rows a list of dicts",
            )
        if shares is not None and not isinstance(shares, Mapping):
            raise ConfigurationError(
                f"{shares!r:.80} has no weights by name",
                code="datasets_do_not_fit",
                where="dataset_weights",
                remedy='pass dataset_weights={"NAME": 1.0, ...}',
            )
        rows = heldout if type(heldout) is dict else dict.fromkeys(train, heldout)
        if rows.keys() != train.keys() or (heldout is not None and type(heldout) is not dict):
            raise ConfigurationError(
                "held-out rows are not by the names of the datasets",
                code="datasets_do_not_fit",
                where="eval_dataset",
                remedy=f"pass a dict with the keys {', '.join(map(repr, train))}, or eval_fraction",
            )
        parts = {
            name: ProgramData(train[name], rows[name], heldout_fraction, rewards, weights, prompt)
            for name in sorted(train)
        }
        return MixedData(parts, dict.fromkeys(parts, 1.0) if shares is None else dict(shares))
    if rewards or weights or heldout is not None or heldout_fraction or prompt:
        raise ConfigurationError(
            "rewards, a prompt and held-out rows need a dataset; an environment brings its own",
            code="dataset_missing",
            where="MultimodalGRPOTrainer",
            remedy="pass train_dataset, or leave out reward_funcs, reward_weights, eval_dataset, eval_fraction and "
            "prompt",
        )
    return None


def refuse_other_data(folder: Path, digest: str) -> None:
    """Check that the training in `folder` resumes with the rows and rewards that it had, and record their digest.

    Raises:
        ConfigurationError: the folder has checkpoints or the result of a training with other rows or rewards.
    """
    record = folder / "data" / "digest"
    resumes = (folder / "final").exists() or any((folder / "checkpoints").glob("[!.]*"))
    if resumes and record.exists() and record.read_text() != digest:
        raise ConfigurationError(
            "the folder has a training with other rows, rewards or weights of rewards",
            code="resumes_other_data",
            where=str(folder),
            remedy="set another output_dir or run_name in config, or delete the folder",
        )
    record.write_text(digest)


def tasks_twice(other: str) -> ConfigurationError:
    """Return the error for tasks from a dataset and from another source."""
    return ConfigurationError(
        f"tasks come from train_dataset and from {other}",
        code="tasks_twice",
        where="MultimodalGRPOTrainer",
        remedy="leave one of them out",
    )


def unknown_reward_part(key: str, parts: Iterable[str]) -> ConfigurationError:
    """Return the error for a config whose `primary_reward_key` is not one of the parts of a reward."""
    return ConfigurationError(
        f"there is no reward part {key!r}",
        code="unknown_reward_part",
        where="primary_reward_key",
        remedy=f"choose from {', '.join(sorted(parts))}",
    )
