"""Child programs that end when this process ends, even if it is killed.

A guard process stands between this process and the program. It holds the read end of a pipe whose write end only this
process holds. Even when this process is killed with SIGKILL, the pipe closes, and the guard stops the program with all
its descendants, including those in other sessions and double-forked daemons: on Linux the guard is a sub-reaper, so
orphans become its children instead of init's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_POLL = 0.5
_SCRATCH, _LOCK = "armature-scratch-", ".guard"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Program:
    """A guarded child program, started by the constructor.

    Example:
        >>> Program(["true"]).wait()
        0

    Args:
        command: the program and its arguments; a name without a folder is looked up on PATH.
        log: file to which stdout and stderr are appended; None: the program inherits this process's stdout and stderr.
        env: changes to the environment variables that the program inherits; None removes a variable.
        grace: seconds between SIGTERM and SIGKILL when the program is stopped.
        pass_fds: open file descriptors that the program inherits, with the same numbers.

    Raises:
        FileNotFoundError: there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        grace: float = GRACE,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.command = [str(part) for part in command]
        self.log, self._grace = log, grace
        # A relative path to the program refers to the folder of this process, not of the child. Links are not resolved,
        # because the interpreter of a virtual environment is a link and works only under its own name.
        program = shutil.which(self.command[0])
        if program is None:
            raise FileNotFoundError(f"no program {self.command[0]!r}")
        self.command[0] = os.path.abspath(program)  # noqa: PTH100 (Path.absolute would keep "..")
        changes = env or {}
        inherited = {key: value for key, value in os.environ.items() if key not in changes}
        child_env = inherited | {key: value for key, value in changes.items() if value is not None}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab") if log is not None else None
        read, self._lifeline = os.pipe()
        try:
            # -I: neither PYTHONPATH nor the working folder may change what the guard imports.
            guard_arguments = [str(read), str(os.getpid()), str(grace), ",".join(map(str, pass_fds))]
            self._guard = subprocess.Popen(
                [sys.executable, "-I", __file__, *guard_arguments, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_env,
                cwd=cwd,
                pass_fds=[read, *pass_fds],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read)
            if output is not None:
                output.close()
        self._open = True

    @property
    def returncode(self) -> int | None:
        """The program's exit code; -N if signal N ended it (SIGTERM if it was stopped); None while it runs."""
        return self._guard.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, see `returncode`. Raises subprocess.TimeoutExpired."""
        return self._guard.wait(timeout)

    def family(self) -> list[psutil.Process]:
        """Return the processes of the program and of all its descendants; the program is the first."""
        try:
            return psutil.Process(self._guard.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def tail(self, lines: int = 30) -> str:
        """Return the last `lines` lines of the log file, from its last MiB; "" without a log file."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 2**20))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> int:
        """Stop the program and its descendants if they still run, and return the exit code, see `returncode`."""
        if self._open:
            self._open = False
            # Closing the pipe is not enough: a child forked in the meantime may hold a copy of the write end.
            try:
                os.write(self._lifeline, b"x")
            except BrokenPipeError:
                pass
            finally:
                os.close(self._lifeline)
        try:
            return self._guard.wait(self._grace + 10)
        except subprocess.TimeoutExpired:
            for process in [*self.family(), psutil.Process(self._guard.pid)]:
                _signal(process, signal.SIGKILL)
            return self._guard.wait()


@contextmanager
def program(
    command: Sequence[str | Path],
    *,
    log: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    grace: float = GRACE,
) -> Iterator[Program]:
    """Start a `Program` for the block, and stop its whole process tree when the block ends for any reason."""
    running = Program(command, log=log, env=env, cwd=cwd, grace=grace)
    try:
        yield running
    finally:
        running.stop()


class ForkGuard:
    """A context manager for code that may fork. A forked child process exits at the end of the block, with code 1."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:
            os._exit(1)


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder for temporary files, also of child programs, which is removed when it is closed.

    The folder is locked while its process lives. The next `Scratch` removes unlocked folders of processes that were
    killed.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
            with suppress(OSError):  # it belongs to another user, or another process is removing it
                _remove_if_abandoned(left)
        while True:
            super().__init__(prefix=_SCRATCH, ignore_cleanup_errors=True)
            self._lock = Path(self.name, _LOCK).open("w")  # noqa: SIM115 (it is locked until the cleanup)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if Path(self.name, _LOCK).exists():  # else another process removed it just before it was locked
                return
            self._lock.close()
            self.cleanup()

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# --- The guard process: one thread, woken by the pipe (lifeline) or by signals ---


def _guard(lifeline: int, parent: int, grace: float, inherited: list[int], command: list[str]) -> int:
    """Run `command` until it ends, the lifeline pipe closes, or this guard process gets a stop signal.

    Return the exit code of `command`; -N if signal N ended it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with Scratch() as folder:
        child = subprocess.Popen(
            command, preexec_fn=_die_with_guard, env=os.environ | {"TMPDIR": folder}, pass_fds=inherited
        )
        for descriptor in inherited:  # so that the process at the other end notices when the program ends
            os.close(descriptor)
        return _until_the_end(child.pid, lifeline, parent, grace, wake, asked)


def _until_the_end(child: int, lifeline: int, parent: int, grace: float, wake: int, asked: list[int]) -> int:
    waiting = select.poll()  # select.select does not support descriptors above 1023
    for descriptor in (lifeline, wake):
        waiting.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll(1000 * _POLL)}
        if wake in ready:
            os.read(wake, 4096)
        code = _reap(child)
        if code is not None:
            _stop_children(grace)
            return code
        # Also check the parent's PID, because a process forked by the parent may keep the pipe open.
        if lifeline in ready or asked or os.getppid() != parent:
            _stop_children(grace)
            return -signal.SIGTERM


def _remove_if_abandoned(folder: Path) -> None:
    with (folder / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def _die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(wanted: int) -> int | None:
    """Collect all ended children. Return the exit code of `wanted` if it is among them, else None."""
    exit_code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if pid == 0:
            return exit_code
        if pid == wanted:
            exit_code = os.waitstatus_to_exitcode(status)


def _stop_children(grace: float) -> None:
    """Stop all descendants of this process and return when they have ended.

    They receive SIGTERM first. Descendants that still run after `grace` seconds receive SIGKILL.
    """
    me = psutil.Process()
    for process in me.children(recursive=True):
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while True:
        _reap(0)
        family = me.children(recursive=True)
        if not family:
            return
        if time.monotonic() > deadline:
            for process in family:
                _signal(process, signal.SIGKILL)
        time.sleep(0.02)


def _main() -> None:
    lifeline, parent, grace, inherited, *command = sys.argv[1:]
    code = _guard(
        int(lifeline), int(parent), float(grace), [int(each) for each in inherited.split(",") if each], command
    )
    if code >= 0:
        os._exit(code)
    # End by the same signal, so that the parent process sees which signal ended the program.
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


if __name__ == "__main__":
    _main()
