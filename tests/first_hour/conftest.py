"""What a newcomer has: a folder, a terminal, a browser, and images of dice that were drawn a minute ago."""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.browser import CHROMIUM

ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS, WINDOW = 40, 120, (1280, 800)
"""Sizes of a laptop's terminal in characters, and of its browser's window in pixels."""
FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"
SPOTS = {1: (4,), 2: (0, 8), 3: (0, 4, 8), 4: (0, 2, 6, 8), 5: (0, 2, 4, 6, 8), 6: (0, 2, 3, 5, 6, 8)}
"""Places of the spots of each number, of nine in three rows."""
CONTROL = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\x1b[()][0-9A-B]|\x1b[=>]|[\r\n\x07\x08]")


def draw_dice(folder: Path, count: int) -> list[tuple[Path, int]]:
    """Draw `count` dice of 56 x 56 pixels in a folder, and return their files and numbers, each from 1 to 6.

    Background, brightness and the places of the spots vary, so that no two images are equal.
    """
    folder.mkdir(parents=True)
    chance, drawn = random.Random(0), []
    for index in range(count):
        number = index % 6 + 1
        image = Image.new("RGB", (56, 56), tuple(chance.randrange(30, 90) for _ in range(3)))
        draw = ImageDraw.Draw(image)
        draw.rounded_rectangle((2, 2, 53, 53), 8, fill=(chance.randrange(220, 256),) * 3)
        for place in SPOTS[number]:
            x, y = (12 + 16 * at + chance.randint(-1, 1) for at in (place % 3, place // 3))
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=(chance.randrange(60),) * 3)
        drawn.append((folder / f"{index:03d}.png", number))
        image.save(drawn[-1][0])
    return drawn


def shown(text: str) -> list[str]:
    """Return the lines that a terminal shows for `text`, without those that were overwritten."""
    lines, row, column, end = [""], 0, 0, 0
    for control in [*CONTROL.finditer(text), None]:
        plain = text[end : control.start() if control else None]
        lines[row] = lines[row][:column].ljust(column) + plain + lines[row][column + len(plain) :]
        column += len(plain)
        if control is None:
            break
        end, (number, action) = control.end(), control.groups()
        if control[0] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif control[0] == "\r":
            column = 0
        elif action == "A":
            row = max(0, row - int(number or 1))
        elif action == "K":
            lines[row] = lines[row][:column]
    return [line.rstrip() for line in lines]


class Command:
    """A command that runs in a terminal of its own, with the keyboard's Ctrl-C."""

    def __init__(self, words: tuple[str, ...], folder: Path, variables: dict[str, str]) -> None:
        self._keyboard, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        hidden = {"COLUMNS", "LINES", "PYTEST_CURRENT_TEST", "NO_COLOR"}
        environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables

        def own_terminal() -> None:
            os.login_tty(terminal)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in the background would have it ignored

        self._process = subprocess.Popen(words, cwd=folder, env=environment, preexec_fn=own_terminal, close_fds=False)
        os.close(terminal)
        self._output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Collect the output until the last process closes the terminal, which Linux reports as an error."""
        with suppress(OSError):
            while part := os.read(self._keyboard, 65536):
                self._output += part

    @property
    def lines(self) -> list[str]:
        return shown(self._output.decode(errors="replace"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the terminal shows `pattern`, and return the match."""
        while (match := re.search(pattern, self.text)) is None:
            assert self._process.poll() is None, self.text
            time.sleep(0.05)
        return match

    def interrupt(self) -> None:
        os.write(self._keyboard, b"\x03")

    def end(self) -> int:
        """Wait until the command ends and return its exit code."""
        code = self._process.wait()
        self._reader.join(10)
        os.close(self._keyboard)
        return code


class Newcomer:
    """A person with a folder and a terminal. Whatever they write or type is counted.

    Pages and terminals are saved as images in the folder ARMATURE_SCREENSHOTS, or in the test's folder.
    """

    def __init__(self, name: str, folder: Path, screenshots: Path) -> None:
        self.name, self.folder, self.screenshots = name, folder, screenshots
        self.lines = 0
        self.commands: list[str] = []
        self.variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def writes(self, name: str, text: str) -> Path:
        """Write a file as the person does in an editor. Lines with text are counted."""
        self.lines += sum(bool(line.strip()) for line in text.splitlines())
        (self.folder / name).write_text(text)
        return self.folder / name

    def starts(self, *words: str) -> Command:
        """Start `armature` with the words, or Python with a script."""
        program = (sys.executable,) if words[0].endswith(".py") else (sys.executable, "-m", "armature")
        self.commands.append(" ".join(("python" if len(program) == 1 else "armature", *words)))
        return Command((*program, *words), self.folder, self.variables)

    def types(self, *words: str, code: int = 0) -> Command:
        """Run a command to its end, check its exit code, and save an image of the terminal."""
        command = self.starts(*words)
        ended = command.end()
        self.photographs(command, words[0].removesuffix(".py"))
        assert ended == code, command.text
        return command

    def photographs(self, command: Command, name: str) -> None:
        """Save the terminal's text, also as an image."""
        lines = [f"$ {self.commands[-1]}", *command.lines]
        text = self._file(f"{name}.txt")
        text.write_text("\n".join(lines) + "\n")
        wrapped = [line[at : at + COLUMNS] for line in lines for at in range(0, len(line) or 1, COLUMNS)]
        image = Image.new("RGB", (8 * COLUMNS + 32, 17 * len(wrapped) + 32), "#16181d")
        font = ImageFont.truetype(FONT, 13)
        ImageDraw.Draw(image).multiline_text((16, 12), "\n".join(wrapped), fill="#d8dee9", font=font, spacing=4)
        image.save(text.with_suffix(".png"))

    @contextmanager
    def opens(self, address: str) -> Iterator[Any]:
        """Open a page in the browser of a laptop, and yield it."""
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WINDOW[0], "height": WINDOW[1]})
            page.problems = []
            page.on("console", lambda message: page.problems.append(message.text))
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            page.goto(address)
            yield page
            browser.close()

    def saves(self, page: Any, name: str, whole: bool = False) -> None:
        """Save what the browser's window shows of a page without scrolling, or the `whole` page."""
        page.screenshot(path=self._file(f"{name}.png"), full_page=whole)

    def _file(self, name: str) -> Path:
        numbers = sum(1 for _ in self.screenshots.glob(f"{self.name}-*.png"))
        return self.screenshots / f"{self.name}-{numbers}-{name}"


@pytest.fixture
def newcomer(request, tmp_path) -> Iterator[Newcomer]:
    """A newcomer in an empty folder. At the end the number of lines that they wrote is printed, and saved."""
    folder = tmp_path / "work"
    folder.mkdir()
    screenshots = Path(os.environ.get("ARMATURE_SCREENSHOTS") or tmp_path / "screenshots")
    screenshots.mkdir(parents=True, exist_ok=True)
    name = request.node.name.removeprefix("test_")
    for old in screenshots.glob(f"{name}-*"):
        old.unlink()
    person = Newcomer(name, folder, screenshots)
    began = time.monotonic()
    yield person
    report = f"{name}: {person.lines} lines written, {time.monotonic() - began:.0f} s"
    report = "\n".join([report, *(f"$ {command}" for command in person.commands)])
    print(report)
    (screenshots / f"{name}-lines.txt").write_text(report + "\n")
