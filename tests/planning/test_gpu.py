"""What data sheets predict, against what GPUs took: the measured seconds are those of docs/benchmarks.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen2_5_VLConfig, Qwen2VLConfig

from armature.components.models.settings import ModelSettings
from armature.components.planning.costs import Costs
from armature.components.planning.estimate import Assumptions, Mfu, Transfer, estimated
from armature.components.planning.geometry import ModelGeometry, geometry
from armature.components.planning.gpus import GPUS
from armature.components.vlm.settings import TrainerSettings
from benchmarks.step_case import TEXT, VISION

DOCS = Path(__file__).parents[2] / "docs"


@cache
def sizes(small: bool = False) -> ModelGeometry:
    """Qwen2.5-VL-3B as the benchmarks made it; small: Qwen2-VL-2B."""
    config: PretrainedConfig = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    if small:
        text = TEXT | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        text |= {"num_attention_heads": 12}
        vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    settings = ModelSettings(source="none", gradient_checkpointing=True)
    return geometry(config, settings, _trainer(), "bfloat16")


def _trainer() -> TrainerSettings:
    return TrainerSettings(learning_rate=1e-6, max_steps=1)


def costs(
    gpu: str, transfer: Transfer = "ipc", mfu: Mfu = "compiled_mfu", small: bool = False, ranks: int = 1
) -> Costs:
    how: dict[str, int] = {"servers": 1, "gpus_per_server": 1, "ranks": ranks, "slots": 256}
    return estimated(sizes(small), GPUS[gpu], Assumptions(), transfer=transfer, mfu=mfu, **how)


def step(
    tokens: int, mfu: Mfu = "compiled_mfu", small: bool = False, gpu: str = "h200", micro: int = 1, ranks: int = 1
) -> float:
    """`tokens` of a rank, in `micro` micro-batches of one size."""
    found = costs(gpu, mfu=mfu, small=small, ranks=ranks).trainer
    each = max(tokens / micro * found.token_seconds, found.gather_seconds)
    return micro * (found.micro_batch_seconds + each + found.exposed_seconds) + found.update_seconds


def sync(transfer: Transfer) -> float:
    found = costs("h100", transfer)
    return found.publish_seconds + found.sync_seconds


CASES = [
    ("H200", "3.75 B, case A, activations recomputed", step(18_989), 0.977, "977 ms"),
    ("H200", "case B, recomputed", step(68_141), 3.136, "3,136 ms"),
    ("H200", "case C, recomputed", step(39_679), 1.864, "1,864 ms"),
    ("H200", "case A, activations kept", step(18_989, "kept_mfu"), 0.750, "750 ms"),
    ("H200", "case B, kept", step(68_156, "kept_mfu", micro=4), 2.464, "2,464 ms"),
    ("H200", "case C, kept", step(39_689, "kept_mfu", micro=3), 1.514, "1,514 ms"),
    ("H200", "case A, packed, not compiled", step(18_989, "packed_mfu"), 1.38, "1.38 s"),
    ("H200", "three micro-batches in place of one", step(18_989, "packed_mfu", micro=3), 2.31, "2.31 s"),
    ("H200", "case A, not packed", step(37_504, "trainer_mfu", micro=4), 4.46, "4.46 s"),
    ("H200", "2.2 B, 64 samples of 574 tokens, not packed", step(36_736, "trainer_mfu", True, micro=3), 3.2, "3.2 s"),
    ("H200", "case B on one of two GPUs", step(68_141), 3.267, "3,267 ms"),
    ("H200", "case B on two, split", step(34_073, ranks=2), 1.892, "1,892 ms"),
    ("H100", "new weights of 3.75 B by `ipc`", sync("ipc"), 0.92, "0.92 s"),
    ("H100", "by `file`, to one server", sync("file"), 15.94, "15.94 s"),
    ("H100", "by `delta`", sync("delta"), 3.98, "3.98 s"),
    ("H100", "by `adapter`", sync("adapter"), 1.16, "1.16 s"),
]


@pytest.mark.parametrize(("gpu", "what", "predicted", "measured", "as_said"), CASES, ids=[case[1] for case in CASES])
def test_what_gpus_took_is_predicted_within_a_fifth(
    gpu: str, what: str, predicted: float, measured: float, as_said: str
) -> None:
    assert predicted == pytest.approx(measured, rel=0.2)
    assert as_said in (DOCS / "benchmarks.md").read_text()
    row = f"| {gpu} | {what} | {predicted:.2f} s | {measured:.2f} s | {predicted / measured - 1:+.0%} |"
    assert row.replace("%", " %") in (DOCS / "planning.md").read_text(), row


def test_ranks_of_many_nodes_gather_over_the_network_of_all_gpus_of_a_node() -> None:
    """A byte enters a node once, over the network of its eight GPUs."""
    within, beyond = (GPUS["a100"].collective(ranks) for ranks in (8, 16))
    assert (within, beyond) == (300e9, 200e9)
    assert costs("h100", ranks=1).trainer.exposed_seconds == costs("h100", ranks=1).trainer.gather_seconds == 0


def test_what_nothing_hides_is_not_hidden() -> None:
    """A rank with hardly any tokens still waits for its host, for each collective, and for what is in no block."""
    alone, split = (costs("h100", ranks=ranks).trainer for ranks in (1, 2))
    said, blocks = Assumptions(), sizes().blocks + 1
    root = 6 * sizes().root / 2 / (450e9 * said.network_share)
    assert split.exposed_seconds == pytest.approx(3 * blocks * said.collective_seconds + root)
    assert split.token_seconds == pytest.approx(alone.token_seconds * 2 * 1775 / 3225)
    assert split.micro_batch_seconds == alone.micro_batch_seconds == pytest.approx(0.115)
