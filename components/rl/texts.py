"""Whether servers turn tokens into text with the run's tokenizer.

Everything that is trained on is token ids, so log-probs agree whatever tokenizer a server has; rewards are of its text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from armature.components.contracts.errors import MismatchError
from armature.components.inference.client import Completion, Message, Sampling
from armature.components.rollouts.generator import Generator


class RecordingGenerator:
    """Answers as `generator` does and keeps every completion in `completions`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.completions: list[Completion] = []

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        completion = await self._generator.complete(messages, sampling, seed)
        self.completions.append(completion)
        return completion


def refuse_other_texts(completions: Sequence[Completion], tokenizer: Tokenizer) -> None:
    """
    Raises:
        MismatchError: a server's text is not what `tokenizer` makes of the tokens; the server's URL and both texts.
    """
    by_server: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for completion in completions:
        if (own := _text(completion, tokenizer)) is not None:
            by_server[completion.server].append((own, completion.text.strip()))
    for server, texts in by_server.items():
        # A server with a reasoning parser leaves thoughts out, at times all there is.
        answered = [pair for pair in texts if pair[1]] or texts
        if different := [(own, theirs) for own, theirs in answered if not _is_part(theirs, own)]:
            own, theirs = different[0]
            raise MismatchError(
                f"the server makes other text of the same tokens than the run's tokenizer, {len(different)} times in "
                f"{len(answered)}; it says {theirs[:200]!r}, the tokenizer {own[:200]!r}",
                code="server_tokenizer_mismatch",
                where=server,
                remedy="start the server from this run's model: a run gives its weights to servers that it joins, not "
                "its tokenizer, and rewards are of the server's text",
            )


def _is_part(theirs: str, own: str) -> bool:
    return theirs in own if theirs else not own.strip()


def _text(completion: Completion, tokenizer: Tokenizer) -> str | None:
    """What a vLLM server with `tokenizer` says: without the token that it stopped at, without a last character that
    is not whole, special tokens included. None if bytes that are not text make that undefined.
    """
    said = completion.token_ids.tolist()
    if completion.finish_reason == "stop":
        said.pop()
    stream = DecodeStream(ids=completion.prompt_token_ids.tolist(), skip_special_tokens=False)
    try:
        parts = [stream.step(tokenizer, token) for token in said]
    except Exception as error:  # the Rust library raises Exception itself, with no class of its own
        if "Invalid prefix" not in str(error):
            raise
        return None
    return "".join(part for part in parts if part is not None)
