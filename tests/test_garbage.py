"""What Python's garbage collector looks at."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from armature.components.garbage import exempt_from_collection

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


def test_what_exists_is_left_out_and_later_objects_are_not():
    """In a process of its own, for all of it changes."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "True"]
