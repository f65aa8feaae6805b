"""On this Triton the kernels of a step and of a layer call are launched directly, which changes no bit of their output.

"Directly" is `treeattn.kernels.packed`; the other ways are Triton's dispatch, which a first call takes, and Triton's
launcher, which is there for a Triton that passes arguments otherwise.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from settings_of_tests import same_bits

import treeattn
from treeattn.kernels.launch import Launch, launch_plan
from treeattn.testing import Case, Options, random_case
from treeattn.testing.run import call_of, group_of

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "fresh": {"head_dim": 128, "tree_kv": "fresh"},
    "slots": {"head_dim": 64, "tree_kv": "slots"},
    "window-sinks-cap": {"head_dim": 64, "options": Options(window_left=20, sinks=True, logits_soft_cap=20.0)},
    "fp8-number": {"head_dim": 128, "options": Options(kv_dtype=torch.float8_e4m3fn, scales="float")},
    "fp8-tensor": {"head_dim": 128, "options": Options(kv_dtype=torch.float8_e4m3fn, scales="heads")},
    "mla": {"head_dim": 576, "num_kv_heads": 1, "options": Options(head_dim_v=512, shared_kv=True)},
}


class Layer:
    """A case's step and layer call, with out and lse of its own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.step = treeattn.plan(case.layout(), case.kv(), backend="triton", **group_of(case))
        self.out = torch.empty(case.total_q, case.num_qo_heads, case.head_dim_v, dtype=case.dtype, device="cuda")
        self.lse = torch.empty(case.total_q, case.num_qo_heads, device="cuda")

    def launches(self) -> dict[str, Launch]:
        """After the first call: the launch of each kernel."""
        (checked,) = self.step.checked.values()
        (layer,) = checked.launches.values()
        return {"plan": self.step.launches["plan"], "attention": layer.attention, "finish": layer.finish}

    def call(self) -> None:
        case = self.case
        treeattn.tree_attention(
            case.q, case.k_cache, case.v_cache, self.step, k_tree=case.k_tree, v_tree=case.v_tree, out=self.out,
            lse=self.lse, **call_of(case),
        )  # fmt: skip

    def again(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The plan and the call once more, with nothing left of what the last ones wrote."""
        buffers = self.step.buffers
        assert buffers is not None
        for tensor in (buffers.work, buffers.turns, buffers.spans):
            tensor.zero_()
        for tensor in (buffers.partial_out, buffers.partial_lse, self.out, self.lse):
            tensor.fill_(torch.nan)
        launch_plan(self.step)
        self.call()
        return self.out.clone(), self.lse.clone()


@pytest.fixture(params=CASES)
def layer(request: pytest.FixtureRequest) -> Layer:
    pins = {"batch": 3, "group": 4, "num_kv_heads": 2, "max_prefix": 700, "max_width": 33, "tail": 0, "empties": False}
    case = random_case(1, device="cuda", dtype=torch.bfloat16, **pins | CASES[request.param])
    return Layer(case)


def test_direct_launches_change_no_bit(layer: Layer) -> None:
    layer.call()
    first = layer.out.clone(), layer.lse.clone()
    launches = layer.launches()
    direct = layer.again()
    assert [name for name, launch in launches.items() if launch.direct is None] == []
    for launch in launches.values():
        launch.direct = None
    by_triton = layer.again()
    for other in (first, by_triton):
        assert same_bits(direct[0], other[0])
        assert same_bits(direct[1], other[1])


def test_direct_launches_are_captured(layer: Layer) -> None:
    layer.call()
    expected = layer.again()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_plan(layer.step)
        layer.call()
    layer.out.fill_(torch.nan)
    layer.lse.fill_(torch.nan)
    graph.replay()
    assert same_bits(layer.out, expected[0])
    assert same_bits(layer.lse, expected[1])


def test_a_thread_whose_first_cuda_call_is_a_launch(layer: Layer) -> None:
    layer.call()
    expected = layer.again()
    layer.out.fill_(torch.nan)
    torch.cuda.synchronize()
    thread = threading.Thread(target=layer.call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert same_bits(layer.out, expected[0])


def test_launches_go_to_the_current_stream(layer: Layer) -> None:
    layer.call()
    expected = layer.again()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        layer.out.fill_(torch.nan)  # behind the sleep: what another stream writes in the meantime is lost
        layer.call()
    torch.cuda.synchronize()
    assert same_bits(layer.out, expected[0])
