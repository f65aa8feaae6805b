"""Every shipped Triton configuration compiles for every chip, fits it, and spills nothing unlisted.

The cases come from the kernels' own catalogue, so a new configuration is in the matrix once it is shipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from treeattn.kernels import catalogue

from treeattn.testing.compile_matrix import SHARED_LIMIT_BYTES, compile_for

# (Triton minor version, arch, case name) -> (bytes of spill stores + loads allowed, why it ships all the
# same)
SPILL_EXCEPTIONS: dict[tuple[str, int, str], tuple[int, str]] = {}

TRITON = ".".join(triton.__version__.split(".")[:2])
CASES = [(arch, *case) for arch in SHARED_LIMIT_BYTES for case in catalogue.compile_cases(arch)]


IDS = [f"sm_{arch}-{name}" for arch, name, *_ in CASES]


@pytest.mark.parametrize(("arch", "name", "jit_fn", "signature", "options"), CASES, ids=IDS)
def test_configuration_fits(
    arch: int, name: str, jit_fn: Any, signature: Any, options: dict[str, Any]
) -> None:
    report = compile_for(arch, jit_fn, signature, **options)
    assert report.fits, (
        f"{report.shared_bytes} bytes of shared memory (limit {report.shared_limit_bytes}), "
        f"{report.tensor_memory_columns} columns of tensor memory"
    )
    allowed, _ = SPILL_EXCEPTIONS.get((TRITON, arch, name), (0, ""))
    assert report.spill_bytes <= allowed, f"{report.spill_bytes} bytes spilled, {allowed} allowed: {report}"
    assert report.spill_bytes > 0 or allowed == 0, "no longer spills: take it off SPILL_EXCEPTIONS"


def test_every_chip_has_cases() -> None:
    assert {arch for arch, *_ in CASES} == set(SHARED_LIMIT_BYTES)


def test_names_are_unique() -> None:
    names = [(arch, name) for arch, name, *_ in CASES]
    assert len(names) == len(set(names))


def test_spill_exceptions_name_cases_that_exist() -> None:
    assert {key[1:] for key in SPILL_EXCEPTIONS} <= {(arch, name) for arch, name, *_ in CASES}
