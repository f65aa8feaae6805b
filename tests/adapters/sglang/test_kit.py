"""SGLang's own attention unit kit, its verify cases with our backend behind its name."""

from __future__ import annotations

import unittest

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    make_dense_cases,
    run_dense_attention_case,
)
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as kit

# The kit's graph cases lay prefixes out afresh, which is right inside one page only (with SGLang's own backend too).
KINDS = (("eagle", 1), ("eagle", 2), ("frozen_kv_mtp", 1), ("dflash", 1), ("ngram", 1))
SHAPES = {
    "mha": {"num_kv_heads": 4, "prefix_lens": (4, 7)},
    "gqa": {"num_kv_heads": 2, "prefix_lens": (0, 11)},
    "window holds all": {"num_kv_heads": 4, "prefix_lens": (1, 2), "sliding_window_size": 4},
    "window cuts": {"num_kv_heads": 4, "prefix_lens": (6, 8), "sliding_window_size": 4},
    "mla": None,
}


def make_case(shape: str) -> DenseAttentionCase | MLAAttentionCase:
    common = {"name": shape, "backend": "triton", "forward_mode": ForwardMode.TARGET_VERIFY, "num_heads": 4}
    common |= {"page_size": 16, "extend_lens": (3, 3)}
    options = SHAPES[shape]
    if options is None:
        return MLAAttentionCase(**common, prefix_lens=(4, 7))
    return DenseAttentionCase(**common, **options)


def run_case(shape: str, kind: str, topk: int, graph: bool, device: str) -> None:
    run = {
        (False, False): kit.run_dense_spec_verify_case,
        (False, True): kit.run_dense_spec_verify_cuda_graph_case,
        (True, False): kit.run_mla_eagle_verify_case,
        (True, True): kit.run_mla_eagle_verify_cuda_graph_case,
    }[SHAPES[shape] is None, graph]
    run(unittest.TestCase(), make_case(shape), topk=topk, spec_kind=kind, device=device)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph API"])
@pytest.mark.parametrize(
    ("shape", "kind", "topk"),
    [(shape, *kind) for shape in SHAPES for kind in (KINDS if shape in ("mha", "mla") else KINDS[:2])],
)
def test_verify(served: list, shape: str, kind: str, topk: int, graph: bool, device: str) -> None:
    if shape == "window cuts" and topk > 1:
        # the kit counts a window by row, which for siblings is not the position: test_windows.py
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            run_case(shape, kind, topk, graph, device)
    else:
        run_case(shape, kind, topk, graph, device)
        # eager, capture and replay of the graph case, or the one eager call
        assert served[-1].treeattn_calls == (3 if graph else 1)
    assert served[-1].treeattn_off is None


@pytest.mark.parametrize("shape", ["mha", "mla"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph API"])
def test_corrupted_output_fails(
    served: list, shape: str, graph: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeattn.adapters.sglang import backend

    attend = backend.attend

    def corrupt(call, step, **options) -> None:
        attend(call, step, **options)
        call.o_extend[1] += 1  # one row of one request

    monkeypatch.setattr(backend, "attend", corrupt)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_case(shape, "eagle", 2, graph, device)


@pytest.mark.parametrize("case", make_dense_cases("triton"), ids=lambda case: case.name)
def test_everything_else_stays_with_the_parent(served: list, case: DenseAttentionCase, device: str) -> None:
    run_dense_attention_case(unittest.TestCase(), case, device=device)
    assert served[-1].treeattn_calls == 0
    assert served[-1].treeattn_off == "no speculative decoding"
