"""Nothing that we start outlives us: tried with exceptions, signals, own sessions and daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from armature.components.machine.process import Program, program

pytestmark = pytest.mark.waits

# A program with a grandchild in a session of its own, one that ignores SIGTERM, and a double-forked daemon.
FAMILY = """
import json, os, signal, subprocess, sys, time
sleep = "import time; time.sleep(120)"
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); " + sleep
own = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
ignoring = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
ignoring.stdout.readline()
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode()); time.sleep(120)
    os._exit(0)
os.wait()
daemon = int(os.read(read, 32))
with open(sys.argv[1] + ".part", "w") as file:
    json.dump([os.getpid(), own.pid, ignoring.pid, daemon], file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
end = sys.argv[2]
if end == "crash": os.kill(os.getpid(), signal.SIGSEGV)
if end == "exit": sys.exit(7)
time.sleep(120)
"""

# One that starts the family under the guard and then ends in a given way.
PARENT = f"""
import os, subprocess, sys, time
from pathlib import Path
from armature.components.machine.process import program
with program([sys.executable, "-c", {FAMILY!r}, sys.argv[1], "stay"], grace=0.5) as running:
    while not Path(sys.argv[1]).exists(): time.sleep(0.02)
    if sys.argv[2] == "exception": raise RuntimeError
    if sys.argv[2] == "exit": os._exit(3)
    if sys.argv[2] == "forked" and os.fork() == 0:
        time.sleep(30); os._exit(0)  # holds a copy of the lifeline, as a data loader's worker would
    running.wait()
"""


def read_pids(path: Path, timeout: float = 20) -> list[int]:
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, "the family did not start"
        time.sleep(0.02)
    return [int(pid) for pid in json.loads(path.read_text())]


def assert_gone(pids: list[int], timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"still alive: {alive}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(tmp_path: Path, end: str) -> list[str]:
    return [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), end]


@pytest.mark.parametrize(
    ("ending", "number"),
    [
        ("exception", None),
        ("exit", None),
        ("wait", signal.SIGTERM),
        ("wait", signal.SIGINT),
        ("wait", signal.SIGKILL),
        ("forked", signal.SIGKILL),
    ],
)
def test_no_program_outlives_its_parent(tmp_path, ending, number):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "pids"), ending],
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    pids = read_pids(tmp_path / "pids")
    assert all(is_alive(pid) for pid in pids) or ending in ("exception", "exit")
    if number is not None:
        time.sleep(0.2)
        parent.send_signal(number)
    parent.wait(20)
    assert_gone(pids)


@pytest.mark.parametrize(("end", "code"), [("exit", 7), ("crash", -signal.SIGSEGV)])
def test_exit_code_and_leftovers_of_a_program_that_ends(tmp_path, end, code):
    with program(family(tmp_path, end), grace=0.3) as running:
        assert running.wait(20) == code
    assert_gone(read_pids(tmp_path / "pids"))


def test_killed_program_shows_sigkill_and_leaves_nothing(tmp_path):
    with program(family(tmp_path, "stay"), grace=0.3) as running:
        pids = read_pids(tmp_path / "pids")
        assert {process.pid for process in running.family()} == set(pids)
        assert running.family()[0].pid == pids[0]
        os.kill(pids[0], signal.SIGKILL)
        assert running.wait(20) == -signal.SIGKILL
    assert_gone(pids)


def test_stop_is_quick_and_can_be_repeated(tmp_path):
    running = Program([sys.executable, "-c", "import time; time.sleep(120)"], grace=60)
    began = time.monotonic()
    assert running.stop() == -signal.SIGTERM == running.stop()
    assert time.monotonic() - began < 30


def test_program_outlives_the_thread_that_started_it(tmp_path):
    box: list[Program] = []
    thread = threading.Thread(target=lambda: box.append(Program(family(tmp_path, "stay"), grace=0.3)))
    thread.start()
    pids = read_pids(tmp_path / "pids")
    thread.join()
    time.sleep(1.2)  # longer than the guard's poll
    assert all(is_alive(pid) for pid in pids)
    box[0].stop()
    assert_gone(pids)


def test_program_has_log_environment_and_folder(tmp_path):
    script = "import os, sys; print(os.environ['A'], 'HOME' in os.environ, os.getcwd()); sys.stderr.write('x\\n'*100)"
    log = tmp_path / "deep" / "log.txt"
    with program([sys.executable, "-c", script], log=log, env={"A": "b", "HOME": None}, cwd=tmp_path) as running:
        assert running.wait(20) == 0
        assert running.tail(3).splitlines() == ["x", "x", "x"]
    assert f"b False {tmp_path}" in log.read_text()


SCRATCH = """
import sys, tempfile, time
from pathlib import Path
print(tempfile.mkdtemp(prefix="torchelastic_"), flush=True)
time.sleep(120)
"""

MONITOR = f"""
import sys
from pathlib import Path
from armature.components.machine.process import Program
running = Program([sys.executable, "-c", {SCRATCH!r}], log=Path(sys.argv[1]))
running.wait()
"""


def temporary_folder(log: Path) -> Path:
    """Return the temporary folder that the program SCRATCH created and printed to `log`."""
    deadline = time.monotonic() + 30
    while not log.exists() or not log.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return Path(log.read_text().strip())


def gone(path: Path) -> bool:
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not path.exists()


@pytest.mark.parametrize("end", ["stop", "kill the parent"])
def test_temporary_files_end_with_the_program(tmp_path, monkeypatch, end):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if end == "stop":
        running = Program([sys.executable, "-c", SCRATCH], log=tmp_path / "log", env={"TMPDIR": str(tmp_path)})
        made = temporary_folder(tmp_path / "log")
        running.stop()
    else:
        command = [sys.executable, "-c", MONITOR, str(tmp_path / "log")]
        with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
            made = temporary_folder(tmp_path / "log")
            parent.kill()
    assert made.parent.parent == tmp_path and gone(made.parent)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_next_start_removes_temporary_files_of_killed_guards(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    with program([sys.executable, "-c", SCRATCH], log=tmp_path / "living.log", env=env):
        living = temporary_folder(tmp_path / "living.log")
        killed = Program([sys.executable, "-c", SCRATCH], log=tmp_path / "killed.log", env=env)
        left = temporary_folder(tmp_path / "killed.log")
        os.kill(psutil.Process(killed.family()[0].pid).ppid(), signal.SIGKILL)
        killed.wait()
        assert left.exists()
        with program([sys.executable, "-c", SCRATCH], log=tmp_path / "next.log", env=env):
            temporary_folder(tmp_path / "next.log")
            assert gone(left) and living.exists()
        killed.stop()
    assert gone(living)


def test_program_starts_with_more_than_1024_open_files():
    code = (
        "import resource, sys\n"
        "from armature.components.machine.process import Program\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))\n"
        "files = [open('/dev/null') for _ in range(1100)]\n"
        "sys.exit(Program([sys.executable, '-c', 'raise SystemExit(7)']).wait(60))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr


PROGRAM = """
import gc
from armature.components.machine.resources import exempt_from_collection

class Cycle:
    def __init__(self):
        self.itself = self

kept = Cycle()
assert any(one is kept for one in gc.get_objects())
exempt_from_collection()
later = Cycle()
found = gc.get_objects()
print(any(one is kept for one in found), any(one is later for one in found), gc.isenabled())
"""


def test_gc_freeze_excludes_existing_objects():
    """Run in a separate process, because the exemption changes the whole process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "True"]
