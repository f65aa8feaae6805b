"""What workers of the tests do: a module that a new process can import."""

from __future__ import annotations

import os
import sys
import time


def work(item: str) -> str:
    """Answers, raises, dies, leaves or hangs, as the item says."""
    if item.startswith("die"):
        os._exit(3)
    if item.startswith("leave"):
        sys.exit(0)
    if item.startswith("hang"):
        time.sleep(600)
    if item.startswith(("raise", "break")):
        raise ValueError(f"cannot {item}")
    return f"{item} done by {os.getpid()}"


def usable(item: str) -> bool:
    return not item.startswith("break")
