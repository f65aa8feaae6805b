"""Properties of `select_config`, over every chip, dtype, head dim and class of rows."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from treeattn import select_config
from treeattn.cli import main
from treeattn.config import SHARED_PER_SM, deepest_pipeline, fits, known_chip, next_power_of_2, shared_bytes

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (1, 16, 17, 32, 64, 72, 96, 128, 192, 256)
GEOMETRIES = [
    (arch, dtype, group, dim, q_len)
    for arch in SHARED_PER_SM
    for dtype in DTYPES
    for group in (1, 3, 4, 8)
    for dim in HEAD_DIMS
    for q_len in (1, 4, 5, 8, 16, 17, 33, 65, 257, 1025)
]


def power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def test_fields_are_what_the_kernels_can_have() -> None:
    for arch, dtype, group, dim, q_len in GEOMETRIES:
        config = select_config(arch, dtype, group, dim, q_len)
        where = (arch, dtype, group, dim, q_len, config)
        assert config.block_d == max(16, next_power_of_2(dim)), where
        assert config.block_m >= 16, where
        assert config.block_n >= 16, where
        for size in (config.block_m, config.block_n, config.num_warps):
            assert power_of_2(size), where
        assert 1 <= config.num_stages <= 4, where
        assert 4 <= config.num_warps <= 8, where
        assert 0 <= config.max_registers <= 255, where
        assert config.programs_per_sm >= 1, where
        assert config.min_share >= 1, where
        assert config.reason, where


def test_programs_of_a_multiprocessor_fit_its_shared_memory() -> None:
    for arch, dtype, group, dim, q_len in GEOMETRIES:
        config = select_config(arch, dtype, group, dim, q_len)
        needed = shared_bytes(arch, dtype, config.block_m, config.block_n, config.block_d, config.num_stages)
        assert fits(arch, needed, config.programs_per_sm), (arch, dtype, dim, config, needed)


def test_same_arguments_give_an_equal_frozen_configuration() -> None:
    for geometry in GEOMETRIES[::7]:
        first, second = select_config(*geometry), select_config(*geometry)
        assert first == second
        assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.block_m = 1  # type: ignore[misc]


@pytest.mark.parametrize("arch", SHARED_PER_SM)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_never_get_a_smaller_tile(arch: int, dtype: torch.dtype) -> None:
    for dim in HEAD_DIMS:
        rows = [select_config(arch, dtype, 1, dim, q_len).block_m for q_len in range(1, 300)]
        assert rows == sorted(rows)


def test_only_the_number_of_packed_rows_counts() -> None:
    for arch in (0, *SHARED_PER_SM):
        assert select_config(arch, torch.bfloat16, 8, 128, 4) == select_config(arch, torch.bfloat16, 4, 128, 8)


@pytest.mark.parametrize("q_len", [5, 16, 17, 65, 257])
def test_measured_choice_on_hopper(q_len: int) -> None:
    config = select_config(90, torch.bfloat16, 4, 128, q_len)
    fields = ("block_m", "block_n", "num_warps", "num_stages", "programs_per_sm")
    assert tuple(getattr(config, field) for field in fields) == (64, 64, 4, 3, 2)


@pytest.mark.parametrize(
    ("arch", "chip"), [(80, 80), (87, 86), (90, 90), (101, 100), (110, 103), (121, 120), (200, 120)]
)
def test_unknown_chip_takes_the_newest_before_it(arch: int, chip: int) -> None:
    assert known_chip(arch) == chip
    assert select_config(arch, torch.float16, 4, 128, 17) == select_config(chip, torch.float16, 4, 128, 17)


def test_old_chip_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"8\.0, got 7\.5"):
        select_config(75, torch.float16, 4, 128, 17)


def test_shared_bytes_worked_out_by_hand() -> None:
    # q 64 x 128 and three stages of K and V, 64 x 128 each, two bytes; Triton takes 112 KiB
    assert shared_bytes(90, torch.bfloat16, 64, 64, 128, 3) == (16 + 3 * 2 * 16 + 1) * 1024
    # one buffer less, and the weights 64 x 64; Triton takes 88 KiB
    assert shared_bytes(80, torch.bfloat16, 64, 64, 128, 3) == (16 + 2 * 2 * 16 + 8 + 1) * 1024
    # a pipeline of one stage still has its tile in shared memory
    assert shared_bytes(90, torch.float32, 16, 32, 128, 1) == (8 + 2 * 16 + 2 + 1) * 1024


def test_reserved_kibibyte_counts_for_each_program() -> None:
    assert fits(90, 113 * 1024, 2)
    assert not fits(90, 113 * 1024 + 1, 2)
    assert fits(86, 99 * 1024)
    assert not fits(86, 99 * 1024 + 1)


def test_deepest_pipeline_prefers_programs_then_order() -> None:
    choices = ((64, 3), (64, 2), (32, 2))
    assert deepest_pipeline(80, torch.bfloat16, 64, 128, 2, choices) == (64, 2, 2)
    assert deepest_pipeline(80, torch.bfloat16, 64, 128, 1, choices) == (64, 3, 1)
    assert deepest_pipeline(86, torch.bfloat16, 64, 128, 2, choices) == (32, 2, 2)
    assert deepest_pipeline(86, torch.bfloat16, 128, 128, 2, choices) == (64, 2, 1)


@pytest.mark.parametrize("arch", SHARED_PER_SM)
def test_info_prints_every_chip(arch: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--arch", str(arch), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["geometries"][0]
    assert shown["tile"]["block_d"] == 128
    assert main(["info", "--arch", str(arch)]) == 0
    assert f"sm_{arch}" in capsys.readouterr().out


@pytest.mark.parametrize("arch", SHARED_PER_SM)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latent_rows_fit_every_chip(arch: int, dtype: torch.dtype) -> None:
    config = select_config(arch, dtype, 8, 576, 17, head_dim_v=512, shared_kv=True)
    assert config.block_d == 512 + 64
    needed = shared_bytes(arch, dtype, config.block_m, config.block_n, config.block_d, config.num_stages, tiles=1)
    assert fits(arch, needed, config.programs_per_sm)


def test_wider_of_k_and_v_counts() -> None:
    assert select_config(90, torch.float16, 4, 64, 9, head_dim_v=128) == select_config(90, torch.float16, 4, 128, 9)
