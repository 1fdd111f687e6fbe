"""The tool `python`: code that a model wrote, in a process that can compute and print, and nothing else.

The process may only make the system calls in `_ALLOWED` once its modules are imported: Linux refuses all others. So the
code cannot open files or connections, start programs, or send signals.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

from armature.components.environments.tools.tool import ToolError

SECONDS, MEMORY, SHOWN = 10, 2**30, 8192
"""Limits of a call: CPU time in seconds, memory in bytes, and characters of output that are shown."""

_PROGRAM = """
import ctypes, platform, struct, sys, resource
import bisect, cmath, collections, datetime, decimal, fractions, functools, heapq, io, itertools, json, math, operator
import random, re, statistics, string, traceback, linecache, encodings.idna, _strptime
try:
    import numpy, numpy.linalg, numpy.random, numpy.fft
except ImportError:
    pass
source = sys.stdin.read()
architectures = {
    "x86_64": (0xC000003E, ALLOWED_X86_64),
    "aarch64": (0xC00000B7, ALLOWED_AARCH64),
}
audit, allowed = architectures[platform.machine()]
code = lambda op, then, other, value: struct.pack("HBBI", op, then, other, value)
program = [code(0x20, 0, 0, 4), code(0x15, 1, 0, audit), code(0x06, 0, 0, 0x80000000), code(0x20, 0, 0, 0)]
for place, number in enumerate(allowed):
    program.append(code(0x15, len(allowed) - place, 0, number))
program += [code(0x06, 0, 0, 0x00050001), code(0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(program))
sock = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, sock, 0, 0):
    sys.exit("the system calls cannot be limited here")
del ctypes, libc
try:
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
except BaseException as error:
    print("".join(traceback.format_exception_only(error)), end="")
sys.stdout.flush()
"""
_ALLOWED = {
    "X86_64": "0 1 3 5 8 9 10 11 12 13 14 15 16 19 20 25 24 28 35 39 60 96 186 201 202 228 229 230 231 262 318 334",
    "AARCH64": "63 64 57 80 62 222 226 215 214 134 135 139 29 66 216 124 233 101 172 93 169 178 98 113 115 94 79 278",
}
"""Numbers of the allowed system calls: read, write, close, fstat, lseek, memory, signal handlers, ioctl, clocks, futex,
getpid, gettid, getrandom and exit."""


def python(code: str) -> str:
    """Run Python code and return what it prints. Only the standard library's mathematics and numpy can be imported.

    Args:
        code: The code. Print the result.
    """
    program = _PROGRAM
    for name, numbers in _ALLOWED.items():
        program = program.replace(f"ALLOWED_{name}", f"[{', '.join(numbers.split())}]")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=Path("/"),
        preexec_fn=limit,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            running.stdin.write(code.encode())
            running.stdin.close()
            output = running.stdout.read(4 * SHOWN)
        finally:
            running.kill()
    text = output.decode(errors="replace")
    if running.returncode == -signal.SIGXCPU:
        raise ToolError(f"the code took more than {SECONDS} s")
    return text[:SHOWN] + "\n... (cut off)" if len(text) > SHOWN else text or "(nothing was printed)"
