"""Token ids as text, for people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from armature.components.contracts.errors import DataError


def token_decoder(checkpoint: Path) -> Callable[[int], str]:
    """Decodes one id, special tokens included, with the `tokenizer.json` of a checkpoint folder.

    A token that is only part of a character gives U+FFFD.

    Raises:
        DataError: the folder has no readable `tokenizer.json`.
    """
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises Exception itself, with no class of its own
        raise DataError(
            f"the tokenizer cannot be read: {error}",
            code="tokenizer_unreadable",
            where=str(path),
            remedy="save the processor to the checkpoint",
        ) from error

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return decode
