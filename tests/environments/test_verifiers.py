"""The environment `verifiers` without the package. Tests with the package are in tests/interop/verifiers."""

from __future__ import annotations

import asyncio
import base64
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from armature.components.contracts.images import EncodedImage
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.verifiers.episode import ChatEndpoint, content
from tests.artifacts.test_videos import file_of, numbers
from tests.refusals import refused


def test_missing_package_error_names_install_command() -> None:
    args = {"interface": "legacy", "id": "sample-colors", "max_turns": 1}
    settings = EnvironmentSettings(name="verifiers", args=args, train_tasks=6, heldout_tasks=3)
    with refused("package_missing", "armature-vla[verifiers]"):
        make_environment(settings)


def chat(port: int, path: str, body: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection.makefile("rb").read()


def test_chat_endpoint_answers_only_its_secret_path() -> None:
    async def talk() -> None:
        endpoint = ChatEndpoint()
        url = urlsplit(await endpoint.start())
        assert url.hostname == "127.0.0.1" and url.port is not None
        assert b"404" in await asyncio.to_thread(chat, url.port, "/v1/chat/completions", b"{}")
        for stream, mark in (
            (b"false", b'"message": {"role": "assistant", "content": "red"}'),
            (b"true", b"data: [DONE]"),
        ):
            body = b'{"messages": [{"role": "user", "content": "?"}], "stream": ' + stream + b"}"
            reply = asyncio.create_task(asyncio.to_thread(chat, url.port, f"{url.path}/chat/completions", body))
            asked = await endpoint.next()
            assert asked.messages == [{"role": "user", "content": "?"}]
            asked.answer.set_result("red")
            assert mark in await reply
        tools = b'{"messages": [], "tools": [{"type": "function"}]}'
        assert b"400" in await asyncio.to_thread(chat, url.port, f"{url.path}/chat/completions", tools)
        with pytest.raises(ValueError):
            await endpoint.next()
        endpoint.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
        {"type": "video_url", "video_url": {"url": "http://169.254.169.254/x.mp4"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,@@"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
    ],
)
def test_rejects_message_parts_other_than_text_and_inline_images(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        content({"role": "user", "content": [part]})
    good = base64.b64encode(b"bytes").decode()
    assert content({"content": [{"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{good}"}}]}) == (
        EncodedImage(b"bytes", "image/webp"),
    )
    clip = base64.b64encode(file_of(8, fps=4)).decode()
    (video,) = content({"content": [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}}]})
    assert isinstance(video, EncodedImage) and numbers(video) == [0, 2, 4, 6]
