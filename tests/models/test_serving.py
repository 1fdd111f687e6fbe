"""vLLM's prompts and log-probs equal the local model's, for every family, with zero to two images and two turns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from armature.components.contracts.images import EncodedImage
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.families.family import FAMILIES
from armature.components.models.load import load_model
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.sft.demonstrate import PromptWriter
from tests.builders import make_trajectory, make_turn
from tests.family_table import record, shows_videos
from tests.images import image_part
from tests.vlm.conftest import learner_of, model_settings, open_tiny, score

from .clips import conversations
from .conftest import BY_HAND

IMAGES = [Image.new("RGB", (100, 80), (200, 30, 30)), Image.new("RGB", (64, 150), (30, 30, 200))]
SETTINGS = model_settings()
VIDEO_FAMILIES = [name for name, family in FAMILIES.items() if shows_videos(family)]
TOLERANCE = 1e-4  # nats per token, both in fp32

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _conversations(images: list[Image.Image]) -> list[tuple[list[dict[str, Any]], list[Image.Image]]]:
    first, second = map(image_part, images)
    turns = [
        {"role": "user", "content": [_text("look "), first, _text("here")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [_text("and "), second, _text("there")]},
    ]
    return [
        # This one is first, so that vLLM has neither image in its cache and processes both in one call.
        ([{"role": "user", "content": [first, _text("or"), second]}], images),
        (turns[:1], images[:1]),
        ([{"role": "system", "content": "Be brief."}, *turns], images),
        ([{"role": "user", "content": "no image"}], []),
    ]


@torch.no_grad()
def _logprobs(model: Any, prompt: dict[str, torch.Tensor], sampled: list[int]) -> list[float]:
    inputs = dict(prompt)
    more = torch.tensor([sampled])
    inputs["input_ids"] = torch.cat([prompt["input_ids"], more], 1)
    for key, value in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if key in prompt:
            inputs[key] = torch.cat([prompt[key], torch.full_like(more, value)], 1)
    logits = model(**inputs).logits[0, -len(sampled) - 1 : -1]
    return logits.log_softmax(-1).gather(1, more.T)[:, 0].tolist()


@pytest.fixture(scope="module")
def servable(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint for each model family. If the family supports it, its image attention is causal, because vLLM's
    attention on CPU is causal."""
    root = tmp_path_factory.mktemp("servable")
    return {
        name: make_tiny_checkpoint(name, root / name, seed=0, image_attention="causal")
        if family.image_attention
        else checkpoint(name)
        for name, family in FAMILIES.items()
        if name not in BY_HAND
    }


@pytest.fixture(scope="module")
def layouts(servable) -> dict[tuple[str, int], Path]:
    """Checkpoint folders of Molmo2 by (layout, seed). The weights of two seeds are stored in both layouts."""
    released = servable["molmo2"]
    other = make_tiny_checkpoint("molmo2", released.with_name("molmo2-1"), seed=1, image_attention="causal")
    folders = {("released", 0): released, ("released", 1): other}
    for seed in (0, 1):
        folder = folders["native", seed] = released.with_name(f"molmo2-native-{seed}")
        shutil.copytree(folders["released", seed], folder)
        save_file(load_model(folder, SETTINGS).state_dict(), folder / "model.safetensors", {"format": "pt"})
        assert load_file(folder / "model.safetensors").keys() != load_file(released / "model.safetensors").keys()
    return folders


# (layout, seed, command) of the weights that one Molmo2 server gets, one after the other.
LOADED = (
    *(("released", 0, "start"), ("native", 1, "load"), ("released", 0, "load in pieces")),
    *(("native", 1, "load in pieces"), ("released", 0, "load"), ("released", 1, "load")),
)


@pytest.fixture(scope="module")
def served(engine, servable, layouts) -> dict[str, list[list[dict[str, Any]]]]:
    """Return vLLM's answers by model family. A family has one list for each checkpoint that vLLM loads, with one answer
    per conversation."""
    conversations = [messages for messages, _ in _conversations(IMAGES)]

    def answers(how: str, folder: Path) -> list[dict[str, Any]]:
        engine(how, str(folder))
        return [engine("ask", [messages], 1.0, {})[0] for messages in conversations]

    served = {name: [answers("start", folder)] for name, folder in servable.items() if name != "molmo2"}
    served["molmo2"] = [answers(how, layouts[layout, seed]) for layout, seed, how in LOADED]
    return served | {"molmo2-native": [answers("start", layouts["native", 0])]}


def _check(folder: Path, answers: list[dict[str, Any]]) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = load_model(folder, SETTINGS)
    for (messages, shown), answer in zip(_conversations(IMAGES), answers, strict=True):
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [shown] if shown else None
        local = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
        assert answer["prompt"] == local["input_ids"][0].tolist() == PromptWriter(processor).prompt(messages).tolist()
        assert _logprobs(model, local, answer["sampled"]) == pytest.approx(answer["logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_HAND])
def test_vllm_prompts_and_logprobs_equal_the_local_model_s(name, servable, served):
    _check(servable[name], served[name][0])


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_vllm_and_trainer_agree_on_videos(name, engine, tmp_path):
    """The weights are large, so that log-probs depend on frames and positions."""
    sharp = {"initializer_range": 0.1, "vision_initializer_range": 0.1}
    tiny = open_tiny(make_tiny_checkpoint(name, tmp_path / "model", settings=sharp))
    tiny.adapter.images = tiny.images.open
    bias = {str(token): -100.0 for token in tiny.collator.forbidden_token_ids}
    engine("start", str(tiny.folder), 3)
    writer, trajectories = PromptWriter(tiny.processor), []
    for case, messages in conversations().items():
        (answer,) = engine("ask", [messages], 1.0, bias)
        assert answer["prompt"] == writer.prompt(messages).tolist(), case
        refs = tuple(
            tiny.images.put(EncodedImage.from_url(part[part["type"]]["url"]))
            for message in messages
            for part in message["content"]
            if isinstance(part, dict) and part["type"] != "text"
        )
        turn = make_turn(
            prompt_token_ids=answer["prompt"],
            completion_token_ids=answer["sampled"],
            completion_logprobs=answer["logprobs"],
            images=refs,
        )
        trajectories.append(make_trajectory(case, "g", [turn]))
    samples, drops = tiny.adapter.samples(GenerateOutputs(trajectories))
    assert not drops
    cases: dict[str, float] = {}
    for packing in (False, True):
        scored = score(learner_of(tiny, packing=packing, max_tokens_per_micro_batch=4096), tiny, samples)
        for sample, own in zip(samples, scored, strict=True):
            gap = np.abs(own - sample.behavior_logprobs)[sample.loss_mask].max()
            print(f"{name}, packed {packing}, {sample.trajectory_id}: {len(own)} tokens, {gap:.1e} nats")
            assert gap < 1e-5, sample.trajectory_id
            cases[sample.trajectory_id] = max(float(f"{gap:.1e}"), cases.get(sample.trajectory_id, 0.0))
    record(name, "video", max(cases.values()), served=True, cases=cases)


@pytest.mark.parametrize("index", range(1, len(LOADED)), ids=lambda index: "-".join(map(str, LOADED[index])))
def test_vllm_reloads_molmo2_weights_in_either_layout(index, layouts, served):
    layout, seed, _ = LOADED[index]
    _check(layouts[layout, seed], served["molmo2"][index])
    before, after = (served["molmo2"][i][0] for i in (index - 1, index))
    assert (before["logprobs"] != after["logprobs"]) == (LOADED[index - 1][1] != seed)


def test_vllm_answers_are_equal_for_both_layouts_of_molmo2(served):
    assert served["molmo2-native"][0] == served["molmo2"][0]


def test_reported_prompt_has_the_tokens_of_every_image(servable, served):
    """Training samples are made of the ids that the server reports, so in training the images are at the same positions
    as during sampling."""
    processor = AutoProcessor.from_pretrained(servable["molmo2"])
    patch, begin = processor.tokenizer.convert_tokens_to_ids(["<im_patch>", "<low_res_im_start>"])
    for (messages, shown), answer in zip(_conversations(IMAGES), served["molmo2"][0], strict=True):
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        assert sum(part["type"] == "image_url" for part in parts) == len(shown)
        assert answer["prompt"].count(begin) == len(shown)
        grids = processor.image_processor(images=shown)["image_grids"] if shown else []
        assert answer["prompt"].count(patch) == sum(low * wide + high * broad for low, wide, high, broad in grids)
