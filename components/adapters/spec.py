"""What the adapter must know about a model family, in one small entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armature.components.adapters.joins import Join
from armature.components.contracts.errors import ConfigurationError


@dataclass(frozen=True)
class FamilySpec:
    """One model family.

    `feature_token`: each one of these in the token ids takes one feature of an image. How many an image needs,
    and in which runs, comes from the processor's own expansion of one image. Written as the token's text, or as a
    path from the processor when it starts with a dot: `".tokenizer.image_token"`.
    `joins`: every output that the image processor gives, and how it is joined across images.
    `type_ids`: the name of the (B, L) input that marks image tokens with 1, or None if the model needs none.
    `typed_tokens`: the texts of the tokens so marked; the feature token if empty.
    `reserved`: the texts of all tokens that only a processor may write and no policy may sample.
    `merge_turns`: False where a later image changes the log-probs of earlier tokens.
    """

    feature_token: str
    joins: Mapping[str, Join]
    type_ids: str | None = None
    typed_tokens: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    merge_turns: bool = True


def token_id(token: str, processor: Any) -> int:
    """The id of `token`, a text or a path as in `FamilySpec`.

    Raises:
        ConfigurationError: the processor has no such attribute, or the tokenizer no such token.
    """
    text: Any = token
    if token.startswith("."):
        text = processor
        for name in token[1:].split("."):
            text = getattr(text, name, None)
    known = processor.tokenizer.get_vocab()
    if not isinstance(text, str) or text not in known:
        raise ConfigurationError(
            f"the tokenizer has no token {text if isinstance(text, str) else token!r}, which stands for images",
            code="image_token_missing",
            where=f"{type(processor).__name__} with {len(known)} tokens",
            remedy="load the processor that belongs to the model, or write a FamilySpec for it",
        )
    return int(known[text])


def known_token_ids(tokens: tuple[str, ...], processor: Any) -> list[int]:
    """The ids of those `tokens` that the tokenizer has: some checkpoints of a family lack some."""
    known = processor.tokenizer.get_vocab()
    return [int(known[token]) for token in tokens if token in known]
