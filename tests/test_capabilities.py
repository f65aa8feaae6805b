"""The capability table: refusals name what is missing and who has it, at the plan and at the call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import treeattn
from treeattn import backends
from treeattn.capabilities import CAPABILITIES, OPTIONS, Asked, missing, nearest, refusal, support_table
from treeattn.geometry import Geometry

EVERY_OPTION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fresh_tree": ({"fresh_tree": True}, {}),
    "fp8_e4m3": ({"kv_dtype": torch.float8_e4m3fn}, {}),
    "fp8_e5m2": ({"kv_dtype": torch.float8_e5m2}, {}),
    "unlike_dims": ({"head_dim_v": 32}, {}),
    "shared_kv": ({"head_dim_v": 32, "shared_kv": True}, {}),
    "window": ({"window_left": 7}, {}),
    "windowed_cache": ({}, {"windowed_cache": True}),
    "part": ({"part": "tree"}, {}),
    "soft_cap": ({}, {"logits_soft_cap": 30.0}),
    "sinks": ({}, {"sinks": True}),
    "batch_invariant": ({"batch_invariant": True}, {}),
}


def asked(name: str | None = None, **geometry: Any) -> Asked:
    mine, more = EVERY_OPTION[name] if name else ({}, {})
    return Asked(Geometry.of(4, 2, 64, **{"dtype": torch.float16, **mine, **geometry}), **more)


def without(monkeypatch: pytest.MonkeyPatch, backend: str, *options: str, **changes: Any) -> None:
    """A table whose `backend` lacks some options."""
    covers = dataclasses.replace(CAPABILITIES[backend], options=frozenset(OPTIONS) - set(options), **changes)
    monkeypatch.setitem(CAPABILITIES, backend, covers)


def test_table_is_whole() -> None:
    assert set(CAPABILITIES) == set(backends.BACKENDS)
    assert set(EVERY_OPTION) == set(OPTIONS)
    for covers in CAPABILITIES.values():
        assert covers.options <= set(OPTIONS)
        assert {name for pair in covers.not_together for name in pair} <= covers.options


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_asked_for_alone_and_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asked(name)
    assert [other for other, option in OPTIONS.items() if option.asked(wanted)] == [name]
    without(monkeypatch, "triton")
    assert missing("triton", "cuda", wanted) is None
    assert missing("triton", "cuda", asked()) is None
    without(monkeypatch, "triton", name)
    words = OPTIONS[name].asked(wanted)
    text = refusal("triton", "cuda", wanted)
    assert text is not None
    assert text.startswith(f"backend 'triton' cannot do this: it lacks {OPTIONS[name].title.split(' (')[0]}")
    assert text.endswith(f"asked for with {words}; backend='torch' can")
    assert refusal("triton", "cuda", asked()) is None
    without(monkeypatch, "torch", name)
    assert nearest("cuda", wanted, but="triton") == "reference"


def test_pairs_sizes_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton", not_together=(("window", "part"),), max_shared_dims=(576, 512))
    assert missing("triton", "cuda", asked("window", part="tree")) == "it has window_left 7 and part 'tree' apart only"
    assert "yes, not with `part`" in support_table()
    assert "1 to 256; MLA to 576 and 512" in support_table()
    big = {"head_dim_v": 512, "shared_kv": True}
    assert missing("triton", "cuda", Asked(Geometry.of(4, 1, 576, **big))) is None
    assert missing("triton", "cuda", Asked(Geometry.of(4, 1, 640, **big))) == "it covers head_dim up to 576, got 640"
    assert missing("triton", "cuda", Asked(Geometry.of(4, 1, 320))) == "it covers head_dim up to 256, got 320"
    assert "not float64" in str(missing("triton", "cuda", asked(dtype=torch.float64)))
    assert "interpreter" in str(missing("triton", "cpu", asked(dtype=torch.bfloat16)))
    assert missing("torch", "cpu", asked(dtype=torch.float64)) is None
    assert "not on xpu" in str(missing("torch", "xpu", asked()))


def test_plan_and_call_refuse_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "windowed_cache", "sinks", "soft_cap")
    layout = treeattn.TreeLayout.chain(torch.tensor([3]), 2)
    table = torch.arange(8)[None]
    with pytest.raises(NotImplementedError, match=r"kv_start; backend='reference' can"):
        treeattn.plan(layout, treeattn.PagedKV(block_table=table, kv_start=torch.tensor([1])), 2, 2, 8, backend="torch")
    kv = treeattn.PagedKV(block_table=table)
    step = treeattn.plan(layout, kv, 2, 2, 8, dtype=torch.float32, backend="torch")
    q, cache, out = torch.randn(2, 2, 8), torch.randn(8, 2, 8), torch.full((2, 2, 8), 7.0)
    for options in ({"sinks": torch.zeros(2)}, {"logits_soft_cap": 3.0}):
        with pytest.raises(NotImplementedError, match=r"backend 'torch' cannot do this: it lacks .* can"):
            treeattn.tree_attention(q, cache, cache, step, out=out, **options)
        assert (out == 7).all()
    treeattn.tree_attention(q, cache, cache, step, out=out)
    assert (out != 7).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_hopper_kernels_lack_triton_has(name: str) -> None:
    lacks = name in ("fp8_e4m3", "fp8_e5m2", "unlike_dims", "shared_kv")  # of these dims, 64
    text = refusal("cuda", "cuda", asked(name))
    assert (text is not None) == lacks
    assert text is None or text.endswith("backend='triton' can")


def test_head_dims_of_the_hopper_kernels() -> None:
    for head_dim in (64, 128, 256):
        assert refusal("cuda", "cuda", Asked(Geometry.of(4, 2, head_dim, dtype=torch.float16))) is None
    odd = Asked(Geometry.of(4, 2, 192, dtype=torch.float16))
    text = str(refusal("cuda", "cuda", odd))
    assert text.endswith("it covers head_dim 64, 128 or 256, got 192; backend='triton' can")


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_caches_of_the_hopper_kernels(kv_dtype: torch.dtype) -> None:
    more = {"fresh_tree": True, "window_left": 7, "part": "prefix", "batch_invariant": True}
    wide = Geometry.of(4, 2, 128, kv_dtype=kv_dtype, **more)
    assert refusal("cuda", "cuda", Asked(wide, windowed_cache=True, logits_soft_cap=3.0, sinks=True)) is None
    narrow = Asked(Geometry.of(4, 2, 64, kv_dtype=kv_dtype))
    text = "with an FP8 cache it covers head_dim 128, got 64; backend='triton' can"
    assert str(refusal("cuda", "cuda", narrow)).endswith(text)


def test_mla_of_the_hopper_kernels() -> None:
    def words(head_dim: int, head_dim_v: int, **more: Any) -> str | None:
        geometry = Geometry.of(8, 1, head_dim, head_dim_v=head_dim_v, shared_kv=True, **more)
        return refusal("cuda", "cuda", Asked(geometry))

    assert words(576, 512) is None
    assert words(576, 512, batch_invariant=True, part="prefix", fresh_tree=True) is None
    assert "it covers head_dim 576 and head_dim_v 512, got 320 and 256; backend='triton' can" in str(words(320, 256))
    assert "head_dim 576 and head_dim_v 512, got 128 and 128" in str(words(128, 128))
    text = "backend 'cuda' cannot do this: it has shared_kv and window_left 7 apart only; backend='triton' can"
    assert words(576, 512, window_left=7) == text
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert words(576, 512, kv_dtype=kv_dtype, batch_invariant=True, part="tree", fresh_tree=True) is None
        assert words(576, 512, kv_dtype=kv_dtype, dtype=torch.float16) is None
        assert "shared_kv and window_left 7 apart only" in str(words(576, 512, kv_dtype=kv_dtype, window_left=7))
    capped = Asked(Geometry.of(8, 1, 576, head_dim_v=512, shared_kv=True), logits_soft_cap=3.0)
    assert "shared_kv and logits_soft_cap 3.0 apart only; backend='triton' can" in str(refusal("cuda", "cuda", capped))
    assert "it covers head_dim 64, 128 or 256, got 576" in str(refusal("cuda", "cuda", Asked(Geometry.of(8, 1, 576))))
