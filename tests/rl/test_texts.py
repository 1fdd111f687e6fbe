"""The check that servers decode tokens with the run's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, TerminalEvents, ThreadUnits, open_store, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import StageContext
from armature.components.environments.make import make_environment
from armature.components.environments.stage import load_tasks
from armature.components.inference.client import Completion
from armature.components.inference.command import vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.models.adapters import get_adapter
from armature.components.models.load import load_processor
from armature.components.models.source import locate
from armature.components.rl.agreement import refuse_other_texts
from armature.components.rl.run import RLRun, RunParts
from armature.components.rl.settings import TrainVLMSettings
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from tests.inference.conftest import stand_ins
from tests.refusals import refused

__all__ = ["stand_ins"]  # a fixture

URL = "http://there:8000"
PROMPT = "What colour is it?"


def byte_tokenizer(first: str) -> Tokenizer:
    """Make a tokenizer with one token per byte, and <end> with id 256. The letters of `first` have the first ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter not in first, letter))
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def sentence_tokenizer() -> Tokenizer:
    """Make a tokenizer with a few words as tokens, and a token for every byte.

    Words begin with a mark. It is decoded as a space, except at the start of a text.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁it", "▁is", "▁red", "▁"]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


OWN, OTHER = byte_tokenizer(""), byte_tokenizer("xyz")
END = 256


def completed(tokens: list[int], text: str, finish_reason: str = "stop", prompt: list[int] | None = None) -> Completion:
    prompt = OWN.encode(PROMPT).ids if prompt is None else prompt
    ids, logprobs = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    return Completion(np.array(prompt, np.int32), ids, logprobs, text, finish_reason, 0, URL, 0.0)


def tokens(text: str) -> list[int]:
    ids: list[int] = OWN.encode(text).ids
    return ids


@pytest.mark.parametrize(
    "completion",
    [
        completed([*tokens("red"), END], "red"),
        completed([END], ""),  # the token at which it stopped is omitted
        completed([*tokens("red"), END, *tokens("is")], "red<end>is", "length"),  # other special tokens are not omitted
        completed(tokens("né €")[:-1], "né ", "length"),  # an incomplete character is omitted
        completed(tokens("é€")[:1], "", "length"),
        completed([*tokens("é")[:1], *tokens("a"), END], "�a"),
        completed([*tokens("red"), 5000, END], "red"),  # the model has more rows than the tokenizer has tokens
        completed([*tokens("I think it is red.</think>\n\nred"), END], "red"),  # a server with a reasoning parser
    ],
    ids=["plain", "nothing", "special", "cut", "only cut", "damaged", "no token", "thoughts"],
)
def test_accepts_text_of_same_tokenizer(completion: Completion) -> None:
    refuse_other_texts([completion], OWN)


def test_text_of_tokens_ignores_leading_space_and_invalid_utf8() -> None:
    tokenizer = sentence_tokenizer()
    pieces = tokenizer.get_vocab()
    it, is_, red, letter, lead = (pieces[piece] for piece in ("▁it", "▁is", "▁red", "<0x41>", "<0xE2>"))
    refuse_other_texts([completed([red, END], " red", prompt=[it, is_])], tokenizer)
    refuse_other_texts([completed([letter, lead, red, END], "A red", prompt=[it])], tokenizer)


def test_unfinished_thoughts_are_ignored_if_other_answers_match() -> None:
    thinking = completed(tokens("I think"), "", "length")
    refuse_other_texts([thinking, completed([*tokens("So: red"), END], "red")], OWN)
    with refused("server_tokenizer_mismatch", "''", "'I think'"):
        refuse_other_texts([thinking], OWN)


def test_rejects_server_with_other_tokenizer() -> None:
    ids = tokens("red")
    theirs = OTHER.decode(ids)
    right = completed([*tokens("It is red."), END], "It is red.")
    with refused("server_tokenizer_mismatch", "1 times in 2", repr(theirs), "'red'", URL):
        refuse_other_texts([right, completed([*ids, END], theirs)], OWN)


def test_preflight_rejects_server_tokenizer_before_trainer_is_used(
    stand_ins: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    (server,) = stand_ins(1)
    server.tokens = (100, 101, 102)  # no placeholders; whatever they are, it says the name of its weights
    overrides = (
        f'machine.store="{tmp_path / "store"}"',
        f'machine.servers.endpoints=["{server.url}"]',
        "preflight.groups=1",
    )
    recipe = load_recipe("train-vlm/colors", (*overrides, "model.tiny.format.steps=1"))
    machine, settings = recipe.sections["machine"], recipe.settings_for(TrainVLMSettings)
    assert isinstance(machine, Machine) and isinstance(settings, TrainVLMSettings)
    inputs = {
        name: run_stage(name, recipe.settings_for(STAGES[name].settings), {}, machine) for name in ("tasks", "model")
    }
    context = StageContext(machine, TerminalEvents(), ThreadUnits(), tmp_path / "work", tmp_path / "images", "0")
    weights = locate(inputs["model"].path)
    adapter = get_adapter(weights, load_processor(weights, settings.model))
    policy = TrainerPolicySettings(
        model_path=weights, model=settings.model, trainer=settings.trainer, temperature=1.0, images=tmp_path / "images"
    )
    parts = RunParts(
        environment=make_environment(settings.environment),
        tasks=load_tasks(inputs["tasks"].path, "train"),
        adapter=adapter,
        tokenizer=adapter.tokenizer,
        vocabulary=vocabulary(weights),
        servers=ServerPool(weights, settings.inference, machine, tmp_path / "logs"),
        trainer=TrainerClient(policy, machine, tmp_path / "trainer"),  # never started
        digests={},
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(parts.servers),
        refused("server_tokenizer_mismatch", "8 times in 8", repr(weights.name), server.url),
    ):
        RLRun(settings.loop, context, open_store(machine), parts, portal).preflight()
