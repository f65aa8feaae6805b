"""The drop-in beside SGLang's own extend_attention_fwd, on the same tensors and against float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd as original
from sglang_bodies import ancestors, random_tree
from torch import Tensor

from treeattn.adapters.sglang import drop_in
from treeattn.adapters.sglang.extend_call import PARAMETERS

WIDTHS, PREFIXES = (17, 9, 1), (5, 40, 0)


class Call:
    """A ragged call: requests of 17, 9 and 1 nodes, shuffled slots, NaN in every slot that holds no prefix.

    Attributes
    ----------
    arguments : dict
        By SGLang's names.
    """

    def __init__(
        self, dim: int = 16, dim_v: int | None = None, kv_heads: int = 2, heads: int = 4,
        index: torch.dtype = torch.int32, mla: bool = False, window: int = -1, fp8: bool = False,
        widths: tuple[int, ...] = WIDTHS, device: str = "cpu", trees: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        self.dim_v = dim_v = dim if dim_v is None else dim_v
        self.widths, self.window, rows, slots = widths, window, sum(widths), 80
        self.parents = [random_tree(width, 3 + width) if trees else list(range(-1, width - 1)) for width in widths]
        self.trees, self.fp8 = trees, fp8
        self.k_pool = torch.full((slots, kv_heads, dim), float("nan"), device=device)
        self.v_pool = self.k_pool[..., :dim_v]
        if not mla:
            self.v_pool = torch.full((slots, kv_heads, dim_v), float("nan"), device=device)
        order = torch.randperm(slots, generator=draw).to(device)
        self.slots = list(order.split([*PREFIXES, slots - sum(PREFIXES)]))[:3]
        for own in self.slots:
            self.k_pool[own] = normal(len(own), kv_heads, dim)
            if not mla:
                self.v_pool[own] = normal(len(own), kv_heads, dim_v)
        k_pool, v_pool = self.k_pool, self.v_pool
        if fp8:
            k_pool, v_pool = k_pool.to(torch.float8_e4m3fn), v_pool.to(torch.float8_e4m3fn)
            self.k_pool, self.v_pool = k_pool.float() * 0.5, v_pool.float() * 0.25
        k = normal(rows, kv_heads, dim)
        held = [own if window < 0 else own[max(0, len(own) - window) :] for own in self.slots]

        def offsets(lengths: list[int], dtype: torch.dtype = index) -> Tensor:
            return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=device)

        self.arguments: dict[str, Any] = {
            "q_extend": normal(rows, heads, dim), "k_extend": k,
            "v_extend": k[..., :dim_v].contiguous() if mla else normal(rows, kv_heads, dim_v),
            "o_extend": torch.full((rows, heads, dim_v), float("nan"), device=device),
            "k_buffer": k_pool, "v_buffer": v_pool, "qo_indptr": offsets(list(widths)),
            "kv_indptr": offsets([len(own) for own in held]), "kv_indices": torch.cat(held).to(index),
            "custom_mask": self.mask("full") if trees else None, "is_causal": True,
            "mask_indptr": offsets([w * (p + w) for w, p in zip(widths, PREFIXES, strict=True)], torch.int64),
            "max_len_extend": max(widths), "k_scale": 0.5 if fp8 else 1.0, "v_scale": 0.25 if fp8 else 1.0,
            "sm_scale": dim**-0.5, "sliding_window_size": window,
            "window_kv_offsets": None if window < 0 else torch.tensor(
                [len(own) - len(kept) for own, kept in zip(self.slots, held, strict=True)], dtype=index, device=device
            ),
            **more,
        }  # fmt: skip

    def mask(self, form: str) -> Tensor:
        device = self.k_pool.device
        parts = []
        for parents, prefix in zip(self.parents, PREFIXES, strict=True):
            seen = ancestors(parents)
            if form == "full":
                seen = torch.cat([torch.ones(len(parents), prefix, dtype=torch.bool), seen], dim=1)
            parts.append(seen.flatten())
        return torch.cat(parts).to(device)

    def run(self, function: Any = drop_in.extend_attention_fwd, **options: Any) -> Tensor:
        arguments = {**self.arguments, **options}
        arguments["o_extend"] = torch.full_like(self.arguments["o_extend"], float("nan"))
        function(**arguments)
        return arguments["o_extend"]

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64 out, and lse with the sinks in it."""
        given, outs, lses = self.arguments, [], []
        group = given["q_extend"].shape[1] // given["k_extend"].shape[1]
        start = 0
        for parents, own in zip(self.parents, self.slots, strict=True):
            rows = slice(start, start + len(parents))
            start += len(parents)
            k = torch.cat([self.k_pool[own], given["k_extend"][rows]]).double().repeat_interleave(group, 1)
            v = torch.cat([self.v_pool[own], given["v_extend"][rows]]).double().repeat_interleave(group, 1)
            nodes = ancestors(parents).to(k.device)
            seen = torch.cat([torch.ones(len(parents), len(own), dtype=torch.bool, device=k.device), nodes], dim=1)
            if self.window >= 0:
                positions = len(own) + nodes.sum(1) - 1
                keys = torch.cat([torch.arange(len(own), device=k.device), positions])
                seen &= keys >= positions[:, None] - self.window
            scores = torch.einsum("ihd,khd->hik", given["q_extend"][rows].double(), k) * given["sm_scale"]
            if cap := given.get("logit_cap", 0.0):
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if (sinks := given.get("sinks")) is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(parents), 1)], dim=2)
                v = torch.cat([v, torch.zeros_like(v[:1])])
            outs.append(torch.einsum("hik,khd->ihd", torch.softmax(scores, dim=2), v))
            lses.append(torch.logsumexp(scores, dim=2).T)
        return torch.cat(outs), torch.cat(lses)


def close(got: Tensor, want: Tensor, budget: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=budget, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"index": torch.int64},
        {"heads": 8, "kv_heads": 1},
        {"dim": 24, "dim_v": 8},
        {"mla": True, "dim": 40, "dim_v": 32, "kv_heads": 1},
        {"logit_cap": 2.0},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
        {"trees": False},
        {"trees": False, "window": 20},
        {"widths": (8, 8, 8), "index": torch.int64},
    ],
    ids=lambda options: ",".join(map(str, options)) or "plain",
)
def test_beside_the_original(options: dict[str, Any]) -> None:
    call = Call(**options)
    lse = torch.full(call.arguments["q_extend"].shape[:2], float("nan"))
    ours = call.run(lse_extend=lse, backend="triton")
    want, want_lse = call.expected()
    close(ours, want)
    close(lse, want_lse)
    close(call.run(original), ours)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["full", "tree"])
def test_mask_forms(form: str, dtype: torch.dtype, index: torch.dtype, backend: str) -> None:
    call = Call()
    lengths = {"full": [17 * 22, 9 * 49, 1], "tree": [289, 81, 1]}[form]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=index)
    for given in (starts, None):
        out = call.run(
            custom_mask=call.mask(form).to(dtype), mask_form=form, mask_indptr=given, backend=backend
        )
        close(out, call.expected()[0])


def test_windows_count_by_depth() -> None:
    """SGLang's kernel counts by row, so that later siblings see less: it is off here."""
    call = Call(window=6)
    close(call.run(backend="triton"), call.expected()[0])
    assert float((call.run(original).double() - call.expected()[0]).abs().max()) > 1e-2


def test_fp8_scales() -> None:
    """SGLang's kernel also rounds q and the weights to FP8, which costs it some of the answer."""
    call = Call(fp8=True)
    ours = call.run(backend="triton")
    close(ours, call.expected()[0], 1e-4)
    with torch.no_grad():
        close(call.run(original), ours, 0.3)


@pytest.mark.parametrize("part", ["prefix", "tree"])
def test_parts(part: str) -> None:
    """What SGLang's context parallelism asks for: one stage alone, with its lse."""
    call = Call()
    options = {"skip_extend": part == "prefix", "skip_prefix": part == "tree"}
    lses = [torch.full(call.arguments["q_extend"].shape[:2], float("nan")) for _ in range(2)]
    ours = call.run(lse_extend=lses[0], backend="triton", **options)
    theirs = call.run(original, lse_extend=lses[1], **options)
    close(ours, theirs)
    torch.testing.assert_close(lses[0], lses[1], atol=1e-5, rtol=0)


REFUSED = {
    "an xai temperature": {"xai_temperature_len": 4},
    "identity_kv_indices": {"identity_kv_indices": True},
    "attention that is not causal": {"is_causal": False, "custom_mask": None},
    "a mask over the prefix": {"skip_prefix_custom_mask": False},
    "scales of a torch.float32 cache": {"k_scale": 0.5},
    "score_mod": {"score_mod": object()},
    "neither prefix nor nodes": {"skip_prefix": True, "skip_extend": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"does not do {words}"):
        Call().run(**REFUSED[words])


def test_pools_of_four_axes_are_refused() -> None:
    call = Call()
    with pytest.raises(NotImplementedError, match="does not do pools of 4 axes"):
        call.run(k_buffer=call.k_pool[None])


def test_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    """Verify calls are served; the rest goes where it went, with one line for each reason."""
    reached = []

    def theirs(*args: Any, **kwargs: Any) -> None:
        reached.append(kwargs)
        original(*args, **kwargs)

    function = drop_in.wrap(theirs, backend="triton", most_rows=16)
    call = Call()
    close(call.run(function), call.expected()[0])
    assert not reached
    with caplog.at_level(logging.WARNING, "treeattn.sglang"):
        for _ in range(2):
            close(call.run(function, xai_temperature_len=4), call.run(original, xai_temperature_len=4), 0)
    assert len(reached) == 2
    assert len([record for record in caplog.records if "an xai temperature" in record.getMessage()]) == 1
    chain = Call(trees=False)
    close(chain.run(function), chain.expected()[0])
    assert len(reached) == 3  # 17 rows without a mask are a prefill here


def test_what_is_wrong_with_a_mask_is_said() -> None:
    call = Call()
    holed = call.mask("full")
    holed[2 * 22 + 3] = False  # row 2 of request 0 does not see token 3 of its prefix
    with pytest.raises(ValueError, match="request 0"):
        call.run(custom_mask=holed)
    with pytest.raises(ValueError, match="request 2"):
        call.run(custom_mask=call.mask("full")[:-1])
    close(call.run(), call.expected()[0])  # nothing is left of that
    drop_in.check("cpu")


def test_founding_bug_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of a server-wide block of 8 under trees of 17: validation names both."""
    monkeypatch.setenv("TREEATTN_VALIDATE", "1")
    call = Call(widths=(17, 17, 17))
    starts = torch.tensor([0, 8 * 13, 8 * 13 + 8 * 48, 8 * 13 + 8 * 48 + 64])
    with pytest.raises(ValueError, match=r"request 1 starts at 104, must be 374 = 17\*\(5\+17\); 104 = 8\*\(5\+8\)"):
        call.run(mask_indptr=starts)


def test_signature() -> None:
    """Arguments by position mean what they mean there."""
    import inspect

    assert tuple(inspect.signature(original).parameters) == PARAMETERS
    call = Call()
    values = list(call.arguments.values())[:16]
    drop_in.extend_attention_fwd(*values, backend="triton")
    close(call.arguments["o_extend"], call.expected()[0])
