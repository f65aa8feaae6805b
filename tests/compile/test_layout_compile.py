"""The layout and verify kernels compile for every chip, as they are launched, and spill nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treeattn.kernels.layout import layout_launches
from treeattn.kernels.layout_rows import Launch
from treeattn.kernels.verify import accept_launch, compact_launches
from treeattn.kv import PagedKV
from treeattn.layout import TreeLayout
from treeattn.layout_input import check_input
from treeattn.testing.compile_matrix import SHARED_LIMIT_BYTES, compile_for
from treeattn.verify import Accepted


def layout_case(batch: int, width: int, index: torch.dtype, **step: Any) -> list[Launch]:
    layout = TreeLayout.allocate(batch + 1, width)
    given: dict[str, Any] = {
        "parents": None, "mask": None, "form": None, "q_len": None, "qo_indptr": None, "num_nodes": None,
        "positions": None, "mask_indptr": None, "exact": False,
    }  # fmt: skip
    given |= step
    if given["qo_indptr"] is None and given["parents"] is None:
        given["q_len"] = width
    source = check_input(
        device=layout.device, layout_rows=layout.total_q, batch=batch,
        prefix_lens=torch.zeros(batch, dtype=index), **given,
    )  # fmt: skip
    return layout_launches(layout, source)


def cases() -> dict[str, list[Launch]]:
    """Launches that together reach every branch and the widest blocks."""
    i32, i64 = torch.int32, torch.int64
    made = {
        "parents-65": layout_case(64, 65, i32, parents=torch.zeros(64, 65, dtype=i32)),
        "parents-1025-ragged": layout_case(
            8, 1025, i64, parents=torch.zeros(8200, dtype=i64), qo_indptr=torch.zeros(9, dtype=i64),
            num_nodes=torch.zeros(8, dtype=i64),
        ),
        "chain-17": layout_case(3, 17, i32),
        "full-65": layout_case(64, 65, i32, mask=torch.zeros(1, dtype=torch.bool), form="full"),
        "packed-1025": layout_case(
            8, 1025, i64, mask=torch.zeros(1, dtype=torch.uint8), form="packed", mask_indptr=torch.zeros(9, dtype=i64)
        ),
        "bias-257": layout_case(8, 257, i32, mask=torch.zeros(1, dtype=torch.bfloat16), form="bias"),
        "words-1025": layout_case(
            8, 1025, i64, mask=torch.zeros(8200, 17, dtype=i64), form="words", positions=torch.zeros(8200, dtype=i64),
            qo_indptr=torch.zeros(9, dtype=i64), num_nodes=torch.zeros(8, dtype=i32),
        ),
    }  # fmt: skip
    for width in (65, 1025):
        layout = TreeLayout.allocate(4, width)
        tokens = torch.zeros(4 * width, dtype=i64)
        made[f"accept-{width}"] = [accept_launch(layout, tokens, tokens, Accepted.allocate(4, width))]
    out = Accepted.allocate(4, 65)
    table = PagedKV(page_size=64, block_table=torch.zeros(4, 8, dtype=i32))
    layout = TreeLayout.allocate(4, 65)
    csr = PagedKV(
        kv_indptr=torch.zeros(5, dtype=i64),
        kv_indices=torch.zeros(9, dtype=i64),
        tree_slots=torch.zeros(260, dtype=i64),
    )
    wide = torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16)
    odd = torch.zeros(9, 1, 3, dtype=torch.uint8)
    made["compact-table"] = compact_launches([wide], table, layout, out.rows, out.lens, "NHD")
    one_page = PagedKV(page_size=64, block_table=torch.zeros(4, 1, dtype=i32))
    made["compact-one-page"] = compact_launches([wide], one_page, layout, out.rows, out.lens, "NHD")
    made["compact-csr-slots"] = compact_launches([odd], csr, layout, out.rows, out.lens, "NHD")
    return made


CASES = cases()

# Scalars kept across the rows of a block of 2048 (8 to 16 bytes a thread, a few of Triton 3.6's and 3.9's
# chips): stored once and loaded once a program, outside the loop. Not measured on a GPU.
SPILLS = {"parents-1025-ragged": 16, "words-1025": 16, "packed-1025": 8}


@pytest.mark.parametrize("arch", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("name", CASES)
def test_fits_and_spills_nothing(arch: int, name: str) -> None:
    for kernel, _, arguments in CASES[name]:
        plain = {k: v.dtype if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        report = compile_for(arch, kernel, plain)
        assert report.fits
        assert report.spill_bytes <= SPILLS.get(name, 0), report
