"""The assistant's messages of a conversation as turns: the prompt that a server would see, and the tokens to train on.

The tokens of an answer lie between two borders. A chat template with generation markers (`{% generation %}`) says them.
For any other template they are found by rendering: an answer begins where the prompt for it ends, and ends with the
token at which servers stop. A template that writes an answer differently is refused, and so is one whose end of a turn
cannot be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.videos import FrameSettings
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.images import VIDEO, EncodedImage, ImageRef
from armature.components.contracts.rollouts import TokenIds, Turn
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import DataFiles
from armature.components.vlm.sft.chats import ChatMessage, ChatRow
from armature.components.vlm.sft.demonstrate import PromptWriter

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begin of the tokens to train on, in chat templates that mark them."""


def stop_tokens(model: Path, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens at which servers stop: one of the tokenizer, and all in generation_config.json.

    Args:
        model: folder of the checkpoint.
    """
    file = model / "generation_config.json"
    document = json.loads(read_bytes(file)) if file.is_file() else {}
    listed = document.get("eos_token_id") or []
    return frozenset({tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None})


class TurnWriter:
    """Writes conversations as turns, with the chat template and processor of a model.

    Args:
        stops: ids of the tokens that end an answer; see `stop_tokens`.
        images: the store to which the images of conversations are written.
    """

    def __init__(self, processor: Any, stops: frozenset[int], images: ImageStore, frames: FrameSettings) -> None:
        self.processor, self.images, self._stops, self._frames = processor, images, stops, frames
        self._prompts = PromptWriter(processor)
        template = processor.chat_template or processor.tokenizer.chat_template or ""
        self._template = template["default"] if isinstance(template, dict) else template
        self.marked = bool(MARKER.search(self._template))

    def turns(self, chat: ChatRow, files: DataFiles) -> list[Turn]:
        """Return a turn for each message of the assistant that is trained on, with log-probs of 0, as a demonstrator
        has.

        Args:
            files: the files that paths of images refer to.

        Raises:
            BadRow: an image is missing or damaged, or the template refuses the conversation or does not show where an
                answer begins and ends.
        """
        refs = [self._stored(image.load(files, self._frames)) for image in chat.images]
        shown = [self.images.open(ref) for ref in refs]
        rest = iter(refs)
        contents = [[part if isinstance(part, str) else next(rest) for part in one.content] for one in chat.messages]
        messages = [_for_template(*each) for each in zip(chat.messages, contents, strict=True)]
        unread: list[dict[str, Any]] = []
        turns: list[Turn] = []
        count = 0
        for number, (message, content) in enumerate(zip(chat.messages, contents, strict=True)):
            if message.role == "assistant" and number >= chat.since:
                prompt, ids = self._turn(messages[: number + 1], chat.tools, shown[:count])
                turns.append(self._made(len(turns), prompt, ids, tuple(refs[:count]), unread))
                unread = []
            else:
                count += sum(isinstance(part, ImageRef) for part in content)
                unread.append({"role": message.role, "content": list(map(_for_people, content))})
        return turns

    def _stored(self, image: EncodedImage) -> ImageRef:
        try:
            return self.images.put(image)
        except DataError as error:
            raise BadRow("bad_image", error.what) from error

    def _turn(self, until: list[dict[str, Any]], tools: Any, shown: Sequence[Any]) -> tuple[TokenIds, TokenIds]:
        """Return prompt and answer, whose message is the last one of `until`, as token ids (P,) and (C,)."""
        number = len(until) - 1
        if self.marked:
            text, spans = self._with_markers(until, tools)
            if len(spans) != sum(each["role"] == "assistant" for each in until):
                raise BadRow("turn_border", f"the chat template marks {len(spans)} answers up to message {number}")
            begin, end = spans[-1]
            return self._prompts.encode(text[:begin], shown), self._ids(text[begin:end])
        prompt, whole = self._render(until[:-1], tools, True), self._render(until, tools)
        if not whole.startswith(prompt):
            remedy = "mark the answers in chat_template.jinja with {% generation %}"
            raise BadRow("turn_border", f"the template's text of message {number} does not follow its prompt; {remedy}")
        ids = self._ids(whole[len(prompt) :])
        stops = np.flatnonzero(np.isin(ids, list(self._stops)))
        if len(stops):
            return self._prompts.encode(prompt, shown), ids[: stops[-1] + 1]
        # Some templates end an answer with what begins the next message.
        later = self._render([*until, {"role": "user", "content": [{"type": "text", "text": "?"}]}], tools)
        follows = self._ids(later[len(whole) :])[:1] if later.startswith(whole) else np.empty(0, np.int32)
        if not np.isin(follows, list(self._stops)).any():
            remedy = "name the token that ends a turn as eos_token_id in the model's generation_config.json"
            raise BadRow("turn_end", f"no stop token ends message {number}; {remedy}")
        return self._prompts.encode(prompt, shown), np.concatenate([ids, follows])

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        """Return the text of messages, with the beginning of the next answer if `prompt`."""
        try:
            return self._prompts.render(messages, tools, prompt)
        except Exception as error:  # the template is other people's code
            raise BadRow("template_error", f"{type(error).__name__}: {error}") from error

    def _with_markers(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and begin and end of each marked part in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self.processor.tokenizer.special_tokens_map,
            )
        except Exception as error:  # the template is other people's code
            raise BadRow("template_error", f"{type(error).__name__}: {error}") from error
        return texts[0], spans[0]

    def _ids(self, text: str) -> TokenIds:
        return np.asarray(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _made(
        self, index: int, prompt: TokenIds, ids: TokenIds, images: tuple[ImageRef, ...], unread: list[dict[str, Any]]
    ) -> Turn:
        text = ids[:-1] if len(ids) and int(ids[-1]) in self._stops else ids
        return Turn(
            index=index,
            prompt_token_ids=prompt,
            completion_token_ids=ids,
            completion_logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop",
            policy_version=0,
            images=images,
            messages=json.dumps(unread, ensure_ascii=False),
            completion=self.processor.tokenizer.decode(text),
            reward=0.0,
            reward_parts={},
            anchor_key=None,
            admissible_key=None,
            action_defect=None,
            generate_seconds=0.0,
            environment_seconds=0.0,
        )


def _for_template(message: ChatMessage, content: Sequence[str | ImageRef]) -> dict[str, Any]:
    """Return a message as templates read it: content is a list of parts, or an empty text beside tool calls."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "video" if part.media_type == VIDEO else "image"}
        for part in content
    ]
    return {"role": message.role, "content": parts or "", **message.fields}


def _for_people(part: str | ImageRef) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "sha256": part.sha256}
