"""Run ``treeattn`` where SGLang's kernel is packed files (sglang_pack.py) and not installed.

    python benchmarks/with_sglang.py SITE bench kimi --providers treeattn_cuda sglang_extend

`SITE` is the folder where they were unpacked. What they import beside Triton is stood in for, as in sglang_rows.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_rows import load_extend

from treeattn.cli import main

if __name__ == "__main__":
    load_extend(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
