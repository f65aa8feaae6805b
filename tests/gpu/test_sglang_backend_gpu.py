"""SGLang's real Triton attention backend on a GPU, eager and in CUDA graphs, with treeattn behind its name.

The bodies are those of tests/adapters/sglang, each file in a process of its own: SGLang is there, and of what it
imports beside torch and Triton there are only stand-ins, which no other test may see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKED = ROOT / ".sglang-gpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (PACKED / "site.tar.xz").is_file(),
        reason=f"no {PACKED.name}/site.tar.xz: benchmarks/sglang_pack.py makes it where SGLang is installed",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is packed, unpacked."""
    site = tmp_path_factory.mktemp("sglang")
    script = ROOT / "benchmarks" / "sglang_pack.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script, PACKED, "--unpack", site], env=environment, check=True)
    return site


@pytest.mark.parametrize("name", ["steps", "trees", "windows", "builders", "kit"])
def test_adapter(name: str, site: Path) -> None:
    search = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "TREEATTN_TEST_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--confcutdir={ROOT / 'tests' / 'adapters'}", f"tests/adapters/sglang/test_{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    end = done.stdout.strip().rpartition("\n")[2]
    print(f"{name}: {end}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in end
    assert "skipped" not in end
