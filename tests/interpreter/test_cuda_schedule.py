"""The CUDA kernel's walk along the plan (csrc/schedule.cuh, compiled for the host): every key of every row, once."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import treeattn
from treeattn.config import KernelConfig
from treeattn.cuda.build import source_dir
from treeattn.kernels.launch import PARTS, is_ranged, split_of

GXX = shutil.which("g++")
EDGE_KEYS = 32
pytestmark = pytest.mark.skipif(GXX is None, reason="no host compiler")

MAIN = """
#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __ldg(from) (*(from))
#define __umulhi(a, b) static_cast<unsigned>(static_cast<unsigned long long>(a) * (b) >> 32)
#include "schedule.cuh"
using namespace treeattn;

static std::vector<int> numbers(int count) {
  std::vector<int> read(count);
  for (int& number : read) if (std::scanf("%d", &number) != 1) return {};
  return read;
}

template <int KEYS>
static void walk(const AttentionParams& p, int programs) {
  for (int block = 0; block < programs; ++block) {
    Cursor at;
    for (int field = 0; field < PLANNED_FIELDS; ++field)
      reinterpret_cast<i32*>(&at)[field] = planned(p, block, field);
    for (;;) {
      cursor_find<KEYS>(at, p);
      if (at.tiles == 0) break;
      const Part part = p.split > 0 ? Part{} : part_of(at);
      std::printf("%d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d\\n", block, at.request,
                  at.kv_head, at.row_tile, at.row0, at.row_end, at.unit, at.end, at.full_tiles, at.full_key,
                  at.tail_key, at.front_units, at.prefix_units, at.edge_begin, at.edge_end, at.tiles, at.whole,
                  at.first, at.full,
                  static_cast<int>(part_slot(at, p)), part.first_block, part.blocks,
                  part.first_block + part.own);
      cursor_advance(at, p);
    }
  }
}

int main() {
  std::vector<int> head = numbers(9);
  int programs = head[0], batch = head[1], keys = head[5];
  auto work = numbers(programs * WORK_FIELDS), turns = numbers(batch * TURN_FIELDS);
  AttentionParams p = {};
  p.work = work.data(), p.turns = turns.data();
  p.ranged = head[6], p.part = head[7], p.split = head[8];
  p.group = head[2], p.kv_heads = head[3], p.total_q = head[4];
  if (keys == 64) walk<64>(p, programs);
  if (keys == 128) walk<128>(p, programs);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "main.cpp").write_text(MAIN)
    done = folder / "walk"
    subprocess.run(
        [str(GXX), "-std=c++17", "-I", str(source_dir()), "-o", str(done), str(folder / "main.cpp")], check=True
    )
    return done


def keys_of_tile(item: dict[str, int], tile: int, prefix: int, nodes: int, keys: int) -> list[int]:
    """Positions (nodes behind the prefix) that the producer copies for a tile, as `Producer::edge` finds them."""
    if tile < item["full_tiles"]:
        first = item["full_key"] + tile * keys
        return list(range(first, first + keys))
    found = []
    for key in range(keys):
        first = item["edge_begin"] + (tile - item["full_tiles"]) * (keys // EDGE_KEYS)
        unit, offset = first + key // EDGE_KEYS, key % EDGE_KEYS
        word = unit - item["prefix_units"]
        if unit >= item["edge_end"]:
            continue
        if word >= 0:
            node = word * EDGE_KEYS + offset
            if node < nodes:
                found.append(prefix + node)
        else:
            front = unit < item["front_units"]
            begin = item["first"] if front else item["tail_key"] - item["front_units"] * EDGE_KEYS
            position = begin + unit * EDGE_KEYS + offset
            if position < (item["full"] if front else prefix):
                found.append(position)
    return found


FIELDS = (
    "block", "request", "kv_head", "row_tile", "row0", "row_end", "unit", "end", "full_tiles", "full_key",
    "tail_key", "front_units", "prefix_units", "edge_begin", "edge_end", "tiles", "whole", "first", "full", "slot",
    "first_block", "blocks", "program",
)  # fmt: skip


OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"part": "prefix"}, {"part": "tree"}, {"window_left": 40}, {"window_left": 0, "part": "prefix"},
    {"batch_invariant": True}, {"batch_invariant": True, "window_left": 150},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("tile_rows", "keys"), [(64, 64), (128, 64), (192, 64), (128, 128), (72, 64)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_key_of_every_row_once(
    program: Path, tile_rows: int, keys: int, seed: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 3 * keys)
    monkeypatch.setattr("treeattn.backends.INTERPRETER_PROGRAMS", (6, 132, 40)[seed // 2 % 3])
    monkeypatch.setattr("treeattn.kernels.launch.is_aligned", lambda step: seed % 2 == 1 and not step.batch_invariant)
    rng = random.Random(seed)
    batch, group, kv_heads = rng.choice((1, 2, 5)), rng.choice((1, 4, 8)), rng.choice((1, 2))
    widths = [rng.choice((1, 8, 17, 65)) for _ in range(batch)]
    if seed % 3 == 0:
        widths = [65] * batch  # as many row tiles each: lanes
    nodes = [rng.choice((0, 1, width, width, width)) for width in widths]
    prefixes = [rng.choice((0, 1, 63, 64, 65, 128, 300, 1000)) for _ in range(batch)]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    parents = torch.cat([torch.arange(-1, width - 1, dtype=torch.int32) for width in widths])
    layout = treeattn.TreeLayout.from_parents(
        parents,
        torch.tensor(prefixes, dtype=torch.int32),
        num_nodes=torch.tensor(nodes, dtype=torch.int32),
        qo_indptr=torch.tensor(starts, dtype=torch.int32),
        max_q_len=max(widths),
    )
    kv = treeattn.PagedKV(page_size=1, block_table=torch.zeros(batch, 2000, dtype=torch.int32))
    config = KernelConfig(tile_rows, keys, 64, 4, 1, 1, 1, "test")
    step = treeattn.plan(
        layout, kv, group * kv_heads, kv_heads, 64, dtype=torch.float32, backend="triton", config=config, **options
    )
    assert step.buffers is not None
    numbers = [step.num_programs, batch, group, kv_heads, starts[-1], keys]
    numbers += [is_ranged(step), PARTS[step.part], split_of(step)]
    numbers += step.buffers.work.flatten().tolist() + step.buffers.turns.flatten().tolist()
    given = " ".join(str(int(number)) for number in numbers)
    walked = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
    items = [dict(zip(FIELDS, map(int, line.split()), strict=True)) for line in walked.stdout.splitlines()]
    seen: Counter[tuple[int, int, int, int]] = Counter()
    rows: dict[tuple[int, int, int], tuple[int, int]] = {}
    slots: Counter[int] = Counter()
    sharing: dict[tuple[int, int, int], list[int]] = {}
    for item in items:
        request = item["request"]
        tile_of = (request, item["kv_head"], item["row_tile"])
        assert rows.setdefault(tile_of, (item["row0"], item["row_end"])) == (item["row0"], item["row_end"])
        assert item["row_end"] - item["row0"] <= tile_rows
        if not item["whole"]:
            slots[item["slot"]] += 1
            sharing.setdefault(tile_of, []).append(item["program"])
        for tile in range(item["tiles"]):
            here = keys_of_tile(item, tile, prefixes[request], nodes[request], keys)
            assert here, "a tile without keys"
            seen.update((*tile_of, position) for position in here)
    assert all(count == 1 for count in slots.values())
    assert all(slot < step.buffers.partial_lse.shape[0] for slot in slots)
    for item in items:
        if not item["whole"] and not step.batch_invariant:
            tile_of = (item["request"], item["kv_head"], item["row_tile"])
            assert sorted(sharing[tile_of]) == list(range(item["first_block"], item["first_block"] + item["blocks"]))
    window, part = options.get("window_left", -1), options.get("part", "all")
    want: Counter[tuple[int, int, int, int]] = Counter()
    for request in range(batch):
        covered = sorted(span for (owner, head, _), span in rows.items() if owner == request and head == 0)
        flat = [row for first, last in covered for row in range(first, last)]
        # the root sees the most: a chain's positions rise
        first = max(prefixes[request] - window, 0) if window >= 0 else 0
        begin = prefixes[request] if part == "tree" else first
        end = prefixes[request] + (nodes[request] if part != "prefix" else 0)
        assert flat == (list(range(nodes[request] * group)) if begin < end else [])
        for tile in range(len(covered)):
            for head in range(kv_heads):
                want.update((request, head, tile, position) for position in range(begin, end))
    assert seen == want
