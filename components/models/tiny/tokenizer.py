"""A byte-level BPE tokenizer trained on a few sentences: small, deterministic, and lossless for any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from armature.components.families.tiny import TinyVocabulary

TEXT = (
    "What colour is this? What color is it? Answer with one word.",
    "The image shows a red, green, blue, yellow, orange, purple, white or black square on the left.",
    "Remember this image. What did the first image show? ok yes no true false",
    "Look at the picture and say where the point is: x = 0, y = 1, 23, 456, 789.",
    "You are a helpful assistant. user system assistant USER SYSTEM ASSISTANT model\n\n",
    "go to open close take put use look examine north south east west",
)
"""Sentences that every tokenizer is trained on."""
BYTES = 256  # tokens of single bytes
REPEATS = 20  # a pair of characters must be frequent to become a token


def train_bpe(size: int, markers: Sequence[str], texts: Iterable[str], like: Tokenizer | None = None) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens: the special tokens `markers`, the 256 bytes, and merges.

    Args:
        like: tokenizer that normalizes and splits text in the same way; None: text is not normalized.
    """
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if like is not None:
        model.normalizer, model.pre_tokenizer = like.normalizer, like.pre_tokenizer
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(markers),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def train_tokenizer(
    vocabulary: TinyVocabulary, size: int, texts: Iterable[str], template: str, max_positions: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `size` tokens: the family's markers, the 256 bytes, and merges learned from `texts`.

    Args:
        vocabulary: special tokens of the family.
        template: chat template.
        max_positions: longest sequence in tokens.
    """
    learned, texts = size - len(vocabulary.words) - len(vocabulary.inputs_only), list(texts)
    model = train_bpe(learned, vocabulary.markers, [*texts, *texts, *TEXT] * REPEATS)
    model.add_tokens([AddedToken(word, normalized=False) for word in vocabulary.words])
    model.add_special_tokens(list(vocabulary.inputs_only))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=vocabulary.pad,
        eos_token=vocabulary.eos,
        bos_token=vocabulary.bos,
        extra_special_tokens=dict(vocabulary.named),
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
        padding_side="right",
    )
    tokenizer.chat_template = template
    return tokenizer
