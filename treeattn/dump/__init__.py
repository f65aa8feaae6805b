"""Judge tensors saved from somebody's own tree attention: ``treeattn check --dump FILE``."""

from .judge import DUMP_KEYS, DumpReport, judge_dump, load_dump

__all__ = ["DUMP_KEYS", "DumpReport", "judge_dump", "load_dump"]
