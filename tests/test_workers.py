"""Work in processes: every item is answered for, whatever happens to the process that had it."""

from __future__ import annotations

import os

from worker_bodies import usable, work

from treeattn.testing.workers import Crash, run_tasks


def test_every_item_is_answered_for() -> None:
    tasks = [["a", "die 1", "b"], ["raise 2", "c"], ["break 3", "d"], ["e", "leave 4"], ["hang 5", "f"], ["break 6"]]
    found = dict(run_tasks(work, tasks, jobs=2, usable=usable, stall_s=4))
    assert set(found) == {item for task in tasks for item in task}
    crashes = {item: result.message for item, result in found.items() if isinstance(result, Crash)}
    assert set(crashes) == {"die 1", "raise 2", "break 3", "leave 4", "hang 5", "break 6"}
    assert crashes["die 1"] == "its process died with exit status 3"
    assert crashes["leave 4"] == "its process died with exit status 0"
    assert crashes["hang 5"] == "no answer for 4 s: killed"
    assert crashes["raise 2"].startswith("ValueError: cannot raise 2 (")
    assert "worker_bodies.py:" in crashes["raise 2"]
    workers = {item: str(result).split()[-1] for item, result in found.items() if item not in crashes}
    assert str(os.getpid()) not in workers.values()
    assert workers["a"] != workers["b"]


def test_one_job_runs_here() -> None:
    found = list(run_tasks(work, [["a", "raise"], ["b"]]))
    assert [item for item, _ in found] == ["a", "raise", "b"]
    assert found[0][1] == f"a done by {os.getpid()}"
    assert isinstance(found[1][1], Crash)
