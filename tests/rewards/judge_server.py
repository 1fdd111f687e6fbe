"""A server that speaks OpenAI's protocol, and misbehaves where it is asked to."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """A judge's server, which misbehaves on demand. A question that contains "mood: NAME" is answered by `MOODS[NAME]`.

    `asked` counts the requests of each question.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[question] += 1
            count = self.server.asked[question]
            self.server.bodies.append(body)
            self.server.keys.add(self.headers.get("Authorization"))
            self.server.times.append(time.monotonic())
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            MOODS[question.rpartition("mood: ")[2].partition(" ")[0]](self, count)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def say(self, text: str | None, status: int = 200, **headers: str) -> None:
        message = {"role": "assistant", "content": text}
        document = {"choices": [{"index": 0, "message": message}], "usage": {"total_tokens": 12}}
        self.send(json.dumps(document).encode(), status, **headers)

    def send(self, content: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def narrowly(self) -> None:
        if self.server.at_once > 3:
            self.say("too many", 429)
        else:
            time.sleep(0.05)
            self.say("Grade: 1")

    def slowly(self) -> None:
        self.send(b"", length=1000)
        for _ in range(100):
            time.sleep(0.1)
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return

    def log_message(self, *_: Any) -> None: ...


def once(fail: Callable[[Handler], object]) -> Callable[[Handler, int], object]:
    """Return a mood that calls `fail` for the first request of a question, and answers further ones with grade 1."""
    return lambda handler, count: fail(handler) if count == 1 else handler.say("Grade: 1")


def leave(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def in_a_second() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=1), usegmt=True)


MOODS: dict[str, Callable[[Handler, int], object]] = {
    "right": lambda handler, _: handler.say("It says what it should.\nGrade: 1"),
    "half": lambda handler, _: handler.say("Grade: 0.2 at first sight. Grade: 0.5."),
    "late": lambda handler, _: (time.sleep(0.3), handler.say("Grade: 1")),
    "narrow": lambda handler, _: handler.narrowly(),
    "wordless": lambda handler, _: handler.say("A fine answer!"),
    "silent": lambda handler, _: handler.say(None),
    "beyond": lambda handler, _: handler.say("Grade: 11"),
    "garbage": lambda handler, _: handler.send(b"<html>\xff\x00"),
    "brackets": lambda handler, _: handler.send(b"[" * 100_000),
    "odd": lambda handler, _: handler.send(b'{"choices": [{"message": {"content": 3}}]}'),
    "list": lambda handler, _: handler.send(b"[]"),
    "flood": lambda handler, _: handler.send(b" " * (2**22 + 1)),
    "redirect": lambda handler, _: handler.say("Grade: 1", 307, Location="http://127.0.0.1:1/v1/chat/completions"),
    "bad": lambda handler, _: handler.send(b"the key sekrit-key is not known", 401),
    "echo-status": lambda handler, _: handler.send(f"unknown: {handler.headers['Authorization']}".encode(), 401),
    "echo-other": lambda handler, _: handler.send(json.dumps({"headers": dict(handler.headers)}).encode()),
    "echo-late": lambda handler, _: handler.send(b"<" * 190 + handler.headers["Authorization"].encode()),
    "echo-escaped": lambda handler, _: handler.send(
        json.dumps({"sent": handler.headers["Authorization"]}).replace("/", "\\/").encode()
    ),
    "echo-chat": lambda handler, _: handler.say("x" * 985 + f"you sent {handler.headers['Authorization']}"),
    "echo-grade": lambda handler, _: handler.say(f"{handler.headers['Authorization']} was sent. Grade: 1"),
    "busy": lambda handler, _: handler.say("busy", 429, Retry_After="0"),
    "broken": lambda handler, _: handler.say("broken", 500),
    "hung": lambda handler, _: handler.slowly(),
    "gone": lambda handler, _: leave(handler),
    "cut": lambda handler, _: (handler.send(b'{"choices": [', length=100), leave(handler)),
    "patient": lambda handler, _: handler.say("later", 429, Retry_After="3600"),
    "busy-once": once(lambda handler: handler.say("busy", 429, Retry_After="1")),
    "dated-once": once(lambda handler: handler.say("busy", 503, Retry_After=in_a_second())),
    "broken-once": once(lambda handler: handler.say("broken", 500)),
    "gone-once": once(leave),
    "garbage-once": once(lambda handler: handler.send(b"<html>")),
    "hung-once": once(Handler.slowly),
}


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
