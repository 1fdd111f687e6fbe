"""What the model server is sent: chat messages whose images are the bytes in the image store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Observation
from armature.components.contracts.errors import DataError
from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.images import EncodedImage, ImageRef


class SharedImages:
    """Stores every distinct image once and keeps its data URL, for all episodes that show it."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._known: dict[tuple[str, str], asyncio.Task[tuple[ImageRef, str]]] = {}

    async def add(self, image: EncodedImage) -> tuple[ImageRef, str]:
        """The image's reference and its data URL.

        Raises:
            RolloutFailed: `bad_image`.
        """
        key = (image.sha256, image.media_type)
        if key not in self._known:
            self._known[key] = asyncio.create_task(asyncio.to_thread(self._put, image))
        try:
            return await self._known[key]
        except DataError as error:
            raise RolloutFailed("bad_image", error.what) from error

    def _put(self, image: EncodedImage) -> tuple[ImageRef, str]:
        ref = self._store.put(image)
        return ref, EncodedImage(self._store.read(ref), ref.media_type).url


class Conversation:
    """The chat of one episode. `messages` is for the server, `images` are its images in order.

    Without `dialogue` every observation begins it again.
    """

    def __init__(self, system_prompt: str | None, shared: SharedImages, dialogue: bool) -> None:
        self._shared, self._dialogue = shared, dialogue
        self._beginning = 0 if system_prompt is None else 1
        self._unread: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.images: tuple[ImageRef, ...] = ()
        if system_prompt is not None:
            self._append({"role": "system", "content": system_prompt})

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._unread.append(message)

    async def observe(self, observation: Observation) -> None:
        """`observation` is one that was checked.

        Raises:
            RolloutFailed: `bad_image`, or `environment_error` for a system message that is not the first.
        """
        if not self._dialogue:
            del self.messages[self._beginning :]
            self.images = ()
        for message in observation.earlier:
            if message.role == "user":
                await self._show(message.content)
            elif message.role == "system" and self.messages:
                raise RolloutFailed("environment_error", "a system message that is not the first message")
            else:
                self._append({"role": message.role, "content": "".join(map(str, message.content))})
        await self._show(observation.content)

    async def _show(self, content: tuple[str | EncodedImage, ...]) -> None:
        sent: list[dict[str, Any]] = []
        shown: list[dict[str, Any]] = []
        for part in content:
            if isinstance(part, str):
                sent.append({"type": "text", "text": part})
                shown.append(sent[-1])
            else:
                ref, url = await self._shared.add(part)
                self.images += (ref,)
                sent.append({"type": "image_url", "image_url": {"url": url}})
                shown.append({"type": "image", "sha256": ref.sha256})
        self.messages.append({"role": "user", "content": sent})
        self._unread.append({"role": "user", "content": shown})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def unread(self) -> str:
        """The messages since the last call, as JSON for people: images by their SHA-256."""
        unread, self._unread = self._unread, []
        return json.dumps(unread, ensure_ascii=False)
