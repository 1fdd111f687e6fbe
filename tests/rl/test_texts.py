"""Servers whose text is not that of the run's tokenizer are refused, and no other ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from components.contracts.errors import MismatchError
from components.inference.client import Completion
from components.inference.pool import ServerPool
from components.inference.settings import SamplingSettings
from components.rl.texts import Overheard, refuse_other_texts
from tests.inference.conftest import checkpoint, make_pool, sampling, stand_ins

__all__ = ["checkpoint", "make_pool", "sampling", "stand_ins"]  # fixtures

URL = "http://there:8000"
PROMPT = "What colour is it?"


def byte_tokenizer(first: str) -> Tokenizer:
    """One token a byte, those of `first` with the first ids, and <end> with id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter not in first, letter))
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def sentence_tokenizer() -> Tokenizer:
    """Words begin with a mark that is a space except in front; bytes that are no word are tokens of their own."""
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


def said(tokens: list[int], text: str, finish_reason: str = "stop", prompt: list[int] | None = None) -> Completion:
    prompt = OWN.encode(PROMPT).ids if prompt is None else prompt
    ids, logprobs = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    return Completion(np.array(prompt, np.int32), ids, logprobs, text, finish_reason, 0, URL, 0.0)


def tokens(text: str) -> list[int]:
    ids: list[int] = OWN.encode(text).ids
    return ids


@pytest.mark.parametrize(
    "completion",
    [
        said([*tokens("red"), END], "red"),
        said([END], ""),  # the token that it stopped at is not said
        said([*tokens("red"), END, *tokens("is")], "red<end>is", "length"),  # any other special token is
        said(tokens("né €")[:-1], "né ", "length"),  # a character that was cut is not
        said(tokens("é€")[:1], "", "length"),
        said([*tokens("é")[:1], *tokens("a"), END], "�a"),
        said([*tokens("red"), 5000, END], "red"),  # the model has more rows than the tokenizer has tokens
        said([*tokens("I think it is red.</think>\n\nred"), END], "red"),  # a server with a reasoning parser
    ],
    ids=["plain", "nothing", "special", "cut", "only cut", "damaged", "no token", "thoughts"],
)
def test_what_an_honest_server_says_is_taken(completion: Completion) -> None:
    refuse_other_texts([completion], OWN)


def test_the_space_after_the_prompt_and_undefined_bytes_are_no_difference() -> None:
    tokenizer = sentence_tokenizer()
    pieces = tokenizer.get_vocab()
    it, is_, red, letter, lead = (pieces[piece] for piece in ("▁it", "▁is", "▁red", "<0x41>", "<0xE2>"))
    refuse_other_texts([said([red, END], " red", prompt=[it, is_])], tokenizer)
    refuse_other_texts([said([letter, lead, red, END], "A red", prompt=[it])], tokenizer)


def test_thoughts_that_never_end_say_nothing_about_a_server_that_answers_elsewhere() -> None:
    thinking = said(tokens("I think"), "", "length")
    refuse_other_texts([thinking, said([*tokens("So: red"), END], "red")], OWN)
    with pytest.raises(MismatchError, match=r"it says '', the tokenizer 'I think'"):
        refuse_other_texts([thinking], OWN)


def test_another_tokenizer_is_refused_with_both_texts_and_the_server() -> None:
    ids = tokens("red")
    theirs = OTHER.decode(ids)
    right = said([*tokens("It is red."), END], "It is red.")
    with pytest.raises(MismatchError, match=f"1 times in 2; it says '{theirs}', the tokenizer 'red'") as caught:
        refuse_other_texts([right, said([*ids, END], theirs)], OWN)
    assert caught.value.where == URL
    assert "start the server from this run's model" in caught.value.remedy


def test_a_joined_server_is_heard_through_the_pool(
    stand_ins: Callable[[int], list[Any]],
    make_pool: Callable[..., ServerPool],
    checkpoint: Callable[..., Path],
    sampling: SamplingSettings,
) -> None:
    (server,) = stand_ins(1)  # whatever it holds, it samples the tokens 3, 4, 5 and says the name of its weights
    letters = "abc" + "v7"

    async def hear() -> list[Completion]:
        async with make_pool([server], checkpoint("v7")) as pool:
            heard = Overheard(pool)
            answer = await heard.complete([{"role": "user", "content": "?"}], sampling, 1)
            assert heard.completions == [answer]
            return heard.completions

    completions = asyncio.run(hear())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    refuse_other_texts(completions, tokenizer)
    with pytest.raises(MismatchError, match="it says 'v7'") as caught:
        refuse_other_texts(completions, OWN)
    assert caught.value.where == server.url
