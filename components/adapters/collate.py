"""Samples of different lengths into the right-padded tensors of one batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.contracts.batches import MultimodalBatch, Sample


def pad_rows(rows: Sequence[np.ndarray[Any, Any]], value: float, dtype: torch.dtype) -> Tensor:
    """(B, longest row), filled with `value` on the right."""
    padded = torch.full((len(rows), max(len(row) for row in rows)), value, dtype=dtype)
    for row, target in zip(rows, padded, strict=True):
        target[: len(row)] = torch.as_tensor(np.asarray(row), dtype=dtype)
    return padded


def token_type_ids(input_ids: Tensor, attention_mask: Tensor, image_tokens: Collection[int]) -> Tensor:
    """(B, L) int64: 1 on `image_tokens`, 0 on text and padding; of whole sequences, completions included."""
    return torch.isin(input_ids, torch.tensor(sorted(image_tokens))).long() * attention_mask


def text_batch(samples: Sequence[Sample], pad_id: int) -> MultimodalBatch:
    """A batch of B samples without what comes from images: int64 ids and mask, bool loss mask, float32 else."""
    ids = pad_rows([sample.input_ids for sample in samples], pad_id, torch.int64)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return MultimodalBatch(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        loss_mask=pad_rows([sample.loss_mask for sample in samples], False, torch.bool),
        behavior_logprobs=pad_rows([sample.behavior_logprobs for sample in samples], 0.0, torch.float32),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=pad_rows([sample.advantages for sample in samples], 0.0, torch.float32),
    )
