"""Convert weights between `MolmoAct2` and released checkpoints, and read and write them one tensor at a time.

In released checkpoints, projections of text layers are fused, and the rotary frequencies are stored as a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from armature.components.artifacts.tensors import INDEX
from armature.components.contracts.errors import DataError
from armature.components.models.molmo2 import from_hub, to_hub
from armature.components.robots.policies.tensors import SINGLE, VALUE_HEAD, Tensors, refuse_others

if TYPE_CHECKING:
    from transformers import Molmo2Config

VLM, EXPERT = "vlm.", "action_expert."
FREQUENCIES = "model.transformer.rotary_emb.inv_freq"
SHARD_BYTES = 5_000_000_000
_EMBEDDINGS = {
    f"{VLM}model.language_model.embed_tokens.{part}": f"model.transformer.wte.{part}"
    for part in ("embedding", "new_embedding")
}
"""Released name of each of the two embedding tables, by its name in `MolmoAct2`.

`to_hub` cannot convert these names, because transformers' Molmo2 has a single embedding table.
"""
_RELEASED_EMBEDDINGS = {released: name for name, released in _EMBEDDINGS.items()}


def to_released(state: Mapping[str, Tensor], config: Molmo2Config) -> dict[str, Tensor]:
    """Return weights of `MolmoAct2` under released names, without a value head.

    `state` may be a part of the model, but needs all parts of a fused tensor. `config` is the configuration of the
    native VLM inside, here and in the functions below.

    Raises:
        DataError: a name is unknown, or a fused tensor lacks a part.
    """
    released, vlm = {}, {}
    for name, tensor in state.items():
        if embedding := _EMBEDDINGS.get(name):
            released[embedding] = tensor
        elif name.startswith(EXPERT):
            released[f"model.{name}"] = tensor
        elif not name.startswith(VALUE_HEAD):
            vlm[name.removeprefix(VLM)] = tensor
    return released | to_hub(vlm, config)


def from_released(tensors: Mapping[str, Tensor], config: Molmo2Config) -> dict[str, Tensor]:
    """Return tensors of a released checkpoint under their names in `MolmoAct2`; the inverse of `to_released`.

    Raises:
        DataError: a name does not exist in a released MolmoAct2.
    """
    state, vlm = {}, {}
    for name, tensor in tensors.items():
        if embedding := _RELEASED_EMBEDDINGS.get(name):
            state[embedding] = tensor
        elif name.startswith(f"model.{EXPERT}"):
            state[name.removeprefix("model.")] = tensor
        else:
            vlm[name] = tensor
    return state | {VLM + name: tensor for name, tensor in from_hub(vlm, config).items()}


def frequencies(config: Molmo2Config) -> Tensor:
    """Return the rotary frequencies of the text layers, float32 of shape (head size / 2,)."""
    text: Any = config.text_config
    exponents = torch.arange(0, text.head_dim, 2, dtype=torch.int64).float() / text.head_dim
    return 1.0 / (text.rope_parameters["rope_theta"] ** exponents)


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Tensors, config: Molmo2Config, where: str) -> None:
    """Copy a checkpoint into the model one tensor at a time, keeping the model's dtypes and devices.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    state = model.state_dict()
    for name, tensor in read_weights(model, tensors, config, where):
        state[name].copy_(tensor)


def read_weights(model: nn.Module, tensors: Tensors, config: Molmo2Config, where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights in their stored dtype, under their names in the model.

    Raises:
        DataError: see `load_weights`; raised before the first weight is yielded.
    """
    state = model.state_dict()
    expected = to_released({name: tensor.to("meta") for name, tensor in state.items()}, config)
    expected[FREQUENCIES] = frequencies(config)
    refuse_others(expected, tensors, where)
    if not torch.allclose(tensors[FREQUENCIES].float(), expected.pop(FREQUENCIES), rtol=1e-2):
        raise DataError(
            "the rotary frequencies do not match text_config.rope_theta",
            code="rope_theta_mismatch",
            where=f"{where}: {FREQUENCIES}",
            remedy="correct rope_theta in config.json; scaled rotary embeddings are not supported",
        )
    for released in expected:
        yield from from_released({released: tensors[released]}, config).items()


def write_released(
    folder: Path, state: Mapping[str, Tensor], config: Molmo2Config, prefix: str = "", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of `MolmoAct2` as safetensors under released names after `prefix`; several shards get an index.

    At most one shard is in memory besides `state`.
    """
    planned = to_released({name: tensor.to("meta") for name, tensor in state.items()}, config)
    planned[FREQUENCIES] = frequencies(config)
    shards = _shards(planned, shard_bytes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {prefix + name: _released_tensor(name, planned[name], state, config) for name in shard}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        sizes = {
            "total_parameters": sum(tensor.numel() for name, tensor in planned.items() if name != FREQUENCIES),
            "total_size": sum(tensor.nbytes for tensor in planned.values()),
        }
        index = {"metadata": sizes, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Divide tensors into shards of at most `most` bytes, and return the tensor names of each shard.

    The order of the tensors stays. A tensor larger than `most` bytes gets a shard of its own.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _released_tensor(name: str, planned: Tensor, state: Mapping[str, Tensor], config: Molmo2Config) -> Tensor:
    """Return the tensor with the released `name`, fused from its parts in `state`. It is contiguous and on the CPU.

    planned: the same tensor without its values, for its shape; the rotary frequencies have their values.
    """
    if name == FREQUENCIES:
        return planned
    parts = from_released({name: planned}, config)
    return to_released({part: state[part].detach().cpu() for part in parts}, config)[name].contiguous()
