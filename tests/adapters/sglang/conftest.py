"""Real SGLang on the CPU: Triton's interpreter, and stand-ins for the packages that cannot be installed.

`served` registers the backend and lists what it makes. With TREEATTN_TEST_DEVICE=cuda test_trees, test_windows,
test_builders and test_kit run on a GPU, with real graphs and a stand-in for SGLang's compiled helpers
(benchmarks/sglang_gpu_site.sh says how).
"""

from __future__ import annotations

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
sys.path[:0] = [str(HERE), str(HERE / "stubs"), *([str(HERE / "stubs_gpu")] if DEVICE == "cuda" else [])]

import pytest  # noqa: E402
import torch  # noqa: E402


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
