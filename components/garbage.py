"""What Python's garbage collector looks at."""

from __future__ import annotations

import gc


def exempt_from_collection() -> None:
    """Exclude every object that exists now.

    After a training step with compiled layers there are 7e5 of them: a full collection takes 0.3 s, and meanwhile a GPU
    runs out of queued work.
    """
    gc.collect()
    gc.freeze()
