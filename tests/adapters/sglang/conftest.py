"""Real SGLang on the CPU: Triton's interpreter, and stand-ins for the packages that cannot be installed.

`served` registers the backend and lists what it makes. With TREEATTN_TEST_DEVICE=cuda test_steps, test_trees,
test_windows, test_builders and test_kit run on a GPU, with real graphs; of SGLang there need only be what
benchmarks/sglang_pack.py packs, and the rest is stood in for. TREEATTN_TEST_STAND_INS=1 does that on a CPU too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEVICE = os.environ.get("TREEATTN_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    if "triton" in sys.modules:
        raise RuntimeError("triton is imported already: TRITON_INTERPRET=1 would come too late")
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TREEATTN_SGLANG_KERNELS"] = "triton"
sys.path[:0] = [str(HERE), str(HERE / "stubs")]

import pytest  # noqa: E402
import torch  # noqa: E402

if DEVICE == "cuda" or os.environ.get("TREEATTN_TEST_STAND_INS") == "1":
    import stand_ins

    stand_ins.install()
if importlib.util.find_spec("sglang") is None:
    raise pytest.UsageError("SGLang is not installed, nor is what benchmarks/sglang_pack.py packs on the path")


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list:
    """The plugin registered; the list holds every backend that is made meanwhile."""
    from sglang.srt.layers.attention import attention_registry

    from treeattn.adapters.sglang import backend, plugin

    made: list = []
    init = backend.TritonAttnBackend.__init__

    def keep(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setenv(plugin.ENABLE, "1")
    monkeypatch.setattr(backend.TritonAttnBackend, "__init__", keep)
    backends = attention_registry.ATTENTION_BACKENDS
    monkeypatch.setitem(backends, "triton", backends["triton"])  # put back afterwards
    assert plugin.register()
    return made
