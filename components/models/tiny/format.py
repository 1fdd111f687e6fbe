"""Pretrain random weights to answer in an environment's format, without teaching them to see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import PreTrainedModel, ProcessorMixin

from armature.components.contracts.errors import DataError
from armature.components.families.family import family_of
from armature.components.families.tiny import FormatSettings, Transcript

WARM_UP_STEPS = 5
"""Steps in which the learning rate rises to its peak."""
IGNORE = -100  # cross_entropy ignores positions with this label


def format_pretraining(
    model: PreTrainedModel, processor: ProcessorMixin, settings: FormatSettings, seed: int
) -> list[float]:
    """Train `model` in place on conversations with blank images and randomly drawn answers. Return the loss of each
    step, in nats per token.

    Every answer appears equally often, so the trained model gives well-formed answers at chance accuracy. Training only
    the embeddings leaves the processing of images unchanged. Training the whole model teaches it to ignore images, and
    reinforcement learning then has nothing to start from. The loss covers the assistant's tokens and the token that
    ends its turn.
    """
    parameters = _trained_parameters(model, settings.trained)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    batches = _Batches(processor, settings, np.random.default_rng(seed))
    losses = []
    model.requires_grad_(False)  # saves the backward pass of weights that are not trained
    for parameter in parameters:
        parameter.requires_grad_(True)
    model.train()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _learning_rate_factor(step, settings.steps)
        inputs, labels = batches.next()
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.zero_grad()
    model.requires_grad_(True)
    model.eval()
    return losses


def _trained_parameters(model: PreTrainedModel, trained: str) -> list[torch.nn.Parameter]:
    """Return the parameters to train: those of the input and output embeddings, or those of the whole language
    model."""
    if trained == "embeddings":
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        return list({id(parameter): parameter for table in tables for parameter in table.parameters()}.values())
    family = family_of(model.config)
    return [parameter for name, parameter in model.named_parameters() if family.component_of(name) == "language"]


def _draws(answers: tuple[str, ...], rng: np.random.Generator) -> Iterator[str]:
    """Yield answers endlessly. Each pass over all answers is in a new random order, so all answers are equally
    frequent."""
    while True:
        for index in reversed(rng.permutation(len(answers)).tolist()):
            yield answers[index]


def _learning_rate_factor(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then a cosine decay."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * max(0.02, 0.5 * (1.0 + math.cos(math.pi * step / steps)))


class _Batches:
    """Batches of training conversations. The positions of the answers among the tokens are computed once per
    conversation."""

    def __init__(self, processor: Any, settings: FormatSettings, rng: np.random.Generator) -> None:
        self.processor, self.settings, self.rng = processor, settings, rng
        self.answers = _draws(settings.answers, rng)
        self.rows = cycle(settings.transcripts)
        self.conversations: dict[tuple[Transcript, str], tuple[str, list[tuple[int, list[int]]]]] = {}
        self.prompt_lengths: dict[str, int] = {}
        self.blank = Image.new("RGB", (settings.image_side, settings.image_side), (128, 128, 128))

    def next(self) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return the processor's tensors of the next B conversations, and labels (B, L) int64. Labels outside of
        answers are IGNORE."""
        texts, images, answers = [], [], []
        for script in islice(self.rows, self.settings.batch_size):
            key = (script, next(self.answers))
            if key not in self.conversations:
                self.conversations[key] = self._conversation(*key)
            text, spans = self.conversations[key]
            texts.append(text)
            answers.append(spans)
            images.append([self.blank] * "".join(script.user).count("{image}"))
        inputs = self._process(texts, images)
        labels = torch.full_like(inputs["input_ids"], IGNORE)
        for row, spans in enumerate(answers):
            for start, tokens in spans:
                end = start + len(tokens)
                if inputs["input_ids"][row, start:end].tolist() != tokens:
                    raise DataError(
                        "an answer is tokenized differently after its prompt",
                        code="answer_tokens_change",
                        where=repr(texts[row]),
                        remedy="begin answers with a letter or a digit",
                    )
                labels[row, start:end] = torch.tensor(tokens)
        return inputs, labels

    def _conversation(self, script: Transcript, answer: str) -> tuple[str, list[tuple[int, list[int]]]]:
        """Return the text of a conversation up to its last stop token, and for each answer the position of its first
        token and its token ids."""
        tokenizer = self.processor.tokenizer
        messages: list[dict[str, Any]] = []
        if self.settings.system:
            messages.append({"role": "system", "content": self.settings.system})
        text, spans, images = "", [], 0
        for user, assistant in zip(script.user, script.assistant, strict=True):
            reply = assistant.replace("{answer}", answer)
            images += user.count("{image}")
            messages.append({"role": "user", "content": _message_parts(user)})
            prompt = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            tokens = tokenizer(reply, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            spans.append((self._length(prompt, images), tokens))
            messages.append({"role": "assistant", "content": reply})
            text = prompt + reply + tokenizer.eos_token
        return text, spans

    def _length(self, prompt: str, images: int) -> int:
        """Return the number of tokens of a prompt in which all images are blank."""
        if prompt not in self.prompt_lengths:
            ids = self._process([prompt], [[self.blank] * images])["input_ids"]
            self.prompt_lengths[prompt] = int(ids.shape[1])
        return self.prompt_lengths[prompt]

    def _process(self, texts: list[str], images: list[list[Image.Image]]) -> Mapping[str, torch.Tensor]:
        inputs = self.processor(
            text=texts,
            images=images if any(images) else None,
            padding=True,
            padding_side="right",
            add_special_tokens=False,
            return_tensors="pt",
        )
        return cast(Mapping[str, torch.Tensor], inputs)


def _message_parts(user: str) -> list[dict[str, str]]:
    """Split a user turn at `{image}` into parts of a chat message."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(user.split("{image}")):
        if index:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts
