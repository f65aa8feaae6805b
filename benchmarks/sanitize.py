"""A small run of each kernel, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitize.py

``--backend cuda`` runs the kernels of csrc instead of Triton's. torch's caching allocator would hide a read or write
past a tensor inside one of its blocks, hence the variable. Exit status 0 only if every result is also right.

``--tool racecheck`` is to find nothing, and no report is suppressed. Of csrc it wants a build of its own,
``TREEATTN_CUDA_MACROS=TREEATTN_LANES_ARRIVE=1``: a warp of an MLA block arrives at a barrier by one lane, behind
``__syncwarp``, and racecheck follows only what a lane has done that arrives itself. A kernel of a few lines whose warps
hand shared memory on in that way is reported, and with an arrival of each lane it is not (docs/cuda.md); nothing else
is different in this build. It does not see what wgmma reads and when: the canary builds of
tests/gpu/test_cuda_gpu.py are for that.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

import treeattn
from treeattn import verify
from treeattn.capabilities import Asked, missing
from treeattn.geometry import Geometry
from treeattn.testing import Case, Options, Placement, build_case, check_case, random_case
from treeattn.testing.run import asked_of
from treeattn.testing.trees import chain, star

OPTIONS: tuple[tuple[Options, dict[str, Any]], ...] = (
    (Options(window_left=16, sinks=True), {"group": 8, "head_dim": 64}),
    (Options(window_left=9, windowed=True, logits_soft_cap=5.0), {"head_dim": 128}),
    (Options(kv_dtype=torch.float8_e4m3fn, scales="heads"), {"head_dim": 128, "tree_kv": "fresh"}),
    (Options(kv_dtype=torch.float8_e5m2, scales="tensor"), {"head_dim": 64, "tree_kv": "slots"}),
    (Options(kv_dtype=torch.float8_e4m3fn, scales="float"), {"head_dim": 128, "group": 8, "max_prefix": 3000}),
    (Options(head_dim_v=512, shared_kv=True), {"head_dim": 576, "num_kv_heads": 1, "group": 8}),
    (
        Options(head_dim_v=512, shared_kv=True, kv_dtype=torch.float8_e4m3fn, scales="float"),
        {"head_dim": 576, "num_kv_heads": 1, "group": 16, "tree_kv": "fresh"},
    ),
    (Options(head_dim_v=128), {"head_dim": 192}),
    (Options(part="prefix"), {"head_dim": 128}),
    (Options(part="tree"), {"head_dim": 128}),
    (Options(batch_invariant=True), {"head_dim": 128, "max_prefix": 5000}),
    (Options(window_left=30, sinks=True), {"head_dim": 256}),
)
"""Options as models have them, and the case that each needs."""

TREES = [[-1, 0, 0, 1, 1, 3, 2, 0, 5], star(17), chain(3), []]


def attention(backend: str) -> int:
    """Shapes that the backend covers; those that it does not are refused, which is right too."""
    wrong = 0
    shapes = [((4, 1), 64), ((8, 2), 128), ((3, 3), 80), ((16, 1), 128), ((4, 1), 256)]
    for index, (heads, dim) in enumerate(shapes):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            place = Placement(
                page_size=(1, 16, 5, 64, 8)[index], table=("csr", "block")[index % 2],
                tree_kv=("logical", "slots", "fresh", "logical", "fresh")[index], stale="huge",
            )  # fmt: skip
            widths = [17, 17, 3, 2] if index % 2 else [17] * 4
            case = build_case(
                TREES,
                [0, 130, 64, 5],
                q_lens=widths,
                heads=heads,
                head_dim=dim,
                dtype=dtype,
                placement=place,
                device="cuda",
            )
            geometry = Geometry.of(*heads, dim, dtype=dtype, fresh_tree=case.k_tree is not None)
            if missing(backend, "cuda", Asked(geometry)) is not None:
                continue
            wrong += sum(_wrong(case, backend, path) for path in ("plain", "static"))
    wide = build_case([star(65), chain(129)], [40, 3], heads=(8, 1), head_dim=64, dtype=torch.bfloat16, device="cuda")
    return wrong + (not check_case(wide, backend).ok)


def options(backend: str) -> int:
    """Each of `OPTIONS` that the backend covers."""
    wrong = 0
    for seed, (chosen, pins) in enumerate(OPTIONS):
        for page_size, number in ((1, seed), (64, seed + len(OPTIONS))):
            case = random_case(
                number, device="cuda", dtype=torch.bfloat16, batch=2, page_size=page_size, options=chosen, **pins
            )
            if missing(backend, "cuda", asked_of(case)) is not None:
                continue
            wrong += sum(_wrong(case, backend, path) for path in ("plain", "static"))
    return wrong


def _wrong(case: Case, backend: str, path: str) -> bool:
    """Whether a run is wrong; csrc may refuse rows where they are."""
    try:
        verdict = check_case(case, backend, path)
    except NotImplementedError as error:
        if backend != "cuda" or "multiples of" not in str(error):
            raise
        return False
    if not verdict.ok:
        print(f"WRONG {path}: {verdict.message}\n  {case.describe()}")
    return not verdict.ok


def layout_and_verify() -> int:
    case = build_case(TREES, [7, 0, 33, 2], q_lens=[17] * 4, device="cuda", placement=Placement(page_size=4))
    layout = case.layout()
    full = layout.full_mask(total=sum(17 * (p + 17) for p in case.prefixes))
    forms: dict[Any, torch.Tensor] = {
        "full": full,
        "tree": layout.tree_mask(total=4 * 17 * 17),
        "words": layout.mask_words,
        "bias": layout.bias(total=full.numel()),
        "packed": layout.packed_mask(total=sum(-(-17 * (p + 17) // 8) for p in case.prefixes))[0],
    }
    for form, mask in forms.items():
        other = treeattn.TreeLayout.from_mask(
            mask, form=form, prefix_lens=layout.prefix_lens, q_len=17, num_nodes=layout.num_nodes
        )
        if not torch.equal(other.mask_words, layout.mask_words):
            print(f"WRONG form {form}")
            return 1
    treeattn.TreeLayout.chain(layout.prefix_lens, 17)
    draft = torch.randint(0, 3, (layout.total_q,), device="cuda")
    target = torch.randint(0, 3, (layout.total_q,), device="cuda")
    accepted = verify.accept(layout, draft, target)
    verify.global_rows(layout, accepted.rows, accepted.lens)
    caches = [cache for cache in (case.k_cache, case.v_cache) if cache is not None]
    verify.compact_kv_(caches, case.kv(), layout, accepted.rows, accepted.lens)
    return 0


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        print("note: without PYTORCH_NO_CUDA_MEMORY_CACHING=1 torch's allocator hides overruns")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    backend = parser.parse_args().backend
    wrong = attention(backend) + options(backend)
    if backend == "triton":
        wrong += layout_and_verify()
    torch.cuda.synchronize()
    print("sanitize run: " + ("all right" if not wrong else f"{wrong} wrong"))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
