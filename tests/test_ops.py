"""The operators that compiled graphs call: their schemas hold, and a compiled model equals the eager one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn

import treeattn
from treeattn import Accepted, PagedKV, StaticBuffers, Step, TreeLayout
from treeattn.plan import step_of

HEADS, KV_HEADS, DIM = 4, 2, 16
BATCH, WIDTH, SLOTS = 3, 6, 96
OPS = torch.ops.treeattn


class Tree(NamedTuple):
    """A step to write into the buffers."""

    parents: list[list[int]]
    num_nodes: list[int]
    prefix_lens: list[int]


TREES = (
    Tree([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 1, -1]], [6, 6, 5], [11, 0, 20]),
    Tree([[-1, 0, 1, 1]], [4], [7]),
    Tree([[-1, 0, 0], [-1, 0, 1], [-1, -1, -1]], [3, 3, 1], [3, 25, 1]),
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing of an earlier test or run: the caches of graphs do not know an operator's schema."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with torch.no_grad(), graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def made(device: torch.device) -> tuple[StaticBuffers, Step]:
    """Buffers with the requests' tokens and nodes in slots of their own, in no order."""
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).view(BATCH, -1)
    kv = PagedKV(page_size=1, block_table=table.to(device, torch.int32))
    buffers = StaticBuffers(BATCH, WIDTH, device=device)
    return buffers, buffers.add_group(HEADS, KV_HEADS, DIM, kv=kv, dtype=torch.float32)


def write_(buffers: StaticBuffers, tree: Tree) -> None:
    lists = {"parents": tree.parents, "num_nodes": tree.num_nodes, "prefix_lens": tree.prefix_lens}
    device = buffers.layout.device
    buffers.update_(**{name: torch.tensor(it, dtype=torch.int32, device=device) for name, it in lists.items()})


def eager_step(tree: Tree, device: torch.device) -> Step:
    parents, nodes, prefixes = (torch.tensor(it, dtype=torch.int32, device=device) for it in tree)
    table = torch.arange(BATCH * 32, dtype=torch.int32, device=device).view(BATCH, -1)[: len(tree.parents)]
    layout = TreeLayout.from_parents(parents, prefixes, nodes)
    kv = PagedKV(page_size=1, block_table=table)
    return treeattn.plan(layout, kv, HEADS, KV_HEADS, DIM, dtype=torch.float32)


def caches(count: int, generator: torch.Generator) -> list[Tensor]:
    shape = (SLOTS, KV_HEADS, DIM)
    return [torch.randn(shape, device=generator.device, generator=generator) for _ in range(count)]


class Layer(nn.Module):
    """Attention that writes its K and V into the cache before it reads them there."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM)
        self.last = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, step: Step) -> Tensor:
        q, k, v = self.qkv(x).split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        k_cache[slots] = k.unflatten(-1, (KV_HEADS, DIM))
        v_cache[slots] = v.unflatten(-1, (KV_HEADS, DIM))
        lse = torch.empty(x.shape[0], HEADS, device=x.device)
        q = q.unflatten(-1, (HEADS, DIM))
        out = treeattn.tree_attention(q, k_cache, v_cache, step, lse=lse, zero_tail=True)
        return x + self.last(out.flatten(1)) * lse.isfinite().any(-1, keepdim=True)


class Model(nn.Module):
    """Two layers; the step is an argument, or an attribute where the model is told to hold it."""

    step: Step | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, stores: list[Tensor], slots: Tensor, step: Step | None = None) -> Tensor:
        step = self.step if step is None else step
        assert step is not None
        x = x + step.layout.depths[: x.shape[0], None]
        for n, layer in enumerate(self.layers):
            x = layer(x, stores[2 * n], stores[2 * n + 1], slots, step)
        return x


def node_slots(step: Step, rows: int) -> Tensor:
    """Slot of each row's K and V; rows of no request and padding share the last slot, which holds no token."""
    layout, table = step.layout, step.kv.table
    slots = torch.full((rows,), SLOTS, dtype=torch.long, device=layout.device)
    starts = layout.qo_indptr.tolist()
    for b, (nodes, prefix) in enumerate(zip(layout.num_nodes.tolist(), layout.prefix_lens.tolist(), strict=True)):
        slots[starts[b] : starts[b] + nodes] = table[b, prefix : prefix + nodes].long()
    return slots


def padded(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.cat([tensor, tensor[:1]]) for tensor in tensors]


@pytest.mark.parametrize("held", [False, True], ids=["argument", "attribute"])
def test_compiled_model_equals_eager_and_an_update_does_not_recompile(
    device: torch.device, generator: torch.Generator, held: bool
) -> None:
    buffers, group = made(device)
    model = Model().to(device)
    model.step = group if held else None
    compiled = torch.compile(model, fullgraph=True)
    for tree in TREES:
        write_(buffers, tree)
        x = torch.randn(BATCH * WIDTH, HEADS * DIM, device=device, generator=generator)
        stores = padded(caches(4, generator))
        theirs = [store.clone() for store in stores]
        arguments = () if held else (group,)
        slots = node_slots(group, BATCH * WIDTH)
        expected = model(x, stores, slots, *arguments)
        torch.testing.assert_close(compiled(x, theirs, slots, *arguments), expected, rtol=1e-4, atol=1e-4)
        # all rows without a token write to the last slot, in any order
        for mine, expected in zip(theirs, stores, strict=True):
            torch.testing.assert_close(mine[:SLOTS], expected[:SLOTS], rtol=1e-4, atol=1e-4)
    assert compilations() == 1


def test_new_steps_recompile_once(device: torch.device, generator: torch.Generator) -> None:
    model = Model().to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n, tree in enumerate((TREES[0], TREES[2], TREES[0], TREES[2])):
        step = eager_step(tree, device)
        rows = step.layout.total_q
        x = torch.randn(rows, HEADS * DIM, device=device, generator=generator)
        stores = padded(caches(4, generator))
        theirs = [store.clone() for store in stores]
        slots = node_slots(step, rows)
        torch.testing.assert_close(compiled(x, theirs, slots, step), model(x, stores, slots, step))
        assert compilations() <= min(n + 1, 2)


@pytest.mark.parametrize("outside", [False, True], ids=["in the graph", "outside"])
def test_an_update_is_refused_in_a_graph(device: torch.device, generator: torch.Generator, outside: bool) -> None:
    buffers, group = made(device)
    k_cache, v_cache = caches(2, generator)
    update_ = torch.compiler.disable(buffers.update_) if outside else buffers.update_

    def around(q: Tensor, parents: Tensor, prefix_lens: Tensor) -> tuple[Tensor, Tensor]:
        first = treeattn.tree_attention(q, k_cache, v_cache, group)
        update_(parents=parents, prefix_lens=prefix_lens)
        return first, treeattn.tree_attention(q, k_cache, v_cache, group)

    compiled = torch.compile(around, backend="aot_eager", fullgraph=not outside)
    q = torch.randn(BATCH * WIDTH, HEADS, DIM, device=device, generator=generator)
    new = torch.tensor(TREES[0].parents, device=device), torch.tensor([9, 4, 2], device=device)
    write_(buffers, TREES[0])
    if not outside:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="update_"):
            compiled(q, *new)
        return
    expected = around(q, *new)
    assert not torch.equal(*expected)
    write_(buffers, TREES[0])
    torch.testing.assert_close(compiled(q, *new), expected)


def test_compiled_code_checks_what_it_is_given(device: torch.device, generator: torch.Generator) -> None:
    buffers, group = made(device)
    write_(buffers, TREES[0])
    k_cache, v_cache = caches(2, generator)
    compiled = torch.compile(treeattn.tree_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"q has 51 query rows.*3 requests of width 6, but q holds rows for width 17"):
        compiled(torch.zeros(3 * 17, HEADS, DIM, device=device), k_cache, v_cache, group)


def test_compiled_walk_and_move_equal_eager(device: torch.device, generator: torch.Generator) -> None:
    def after(layout: TreeLayout, kv: PagedKV, draft: Tensor, target: Tensor, stores: list[Tensor]) -> Any:
        accepted = treeattn.accept(layout, draft, target)
        treeattn.compact_kv_(stores, kv, layout, accepted.rows, accepted.lens)
        return *accepted, treeattn.global_rows(layout, accepted.rows), stores[0] + 1

    buffers, group = made(device)
    compiled = torch.compile(after, fullgraph=True)
    moved = 0
    for tree in TREES:
        write_(buffers, tree)
        # the same tokens on every device: some of them are accepted past a sibling, so that rows move
        tokens = torch.randint(0, 2, (2, BATCH * WIDTH), generator=torch.Generator().manual_seed(0))
        draft, target = tokens.to(device)
        stores = caches(2, generator)
        theirs = [store.clone() for store in stores]
        before = stores[1].clone()
        expected = after(buffers.layout, group.kv, draft, target, stores)
        torch.testing.assert_close(compiled(buffers.layout, group.kv, draft, target, theirs), expected, rtol=0, atol=0)
        torch.testing.assert_close(theirs, stores, rtol=0, atol=0)
        moved += int((before != stores[1]).any())
    assert moved > 0
    assert compilations() == 1


@pytest.mark.parametrize("full", [False, True], ids=["least", "all"])
def test_opcheck_tree_attention(device: torch.device, generator: torch.Generator, full: bool) -> None:
    step = eager_step(TREES[0], device)
    rows = step.layout.total_q
    q = torch.randn(rows, HEADS, DIM, device=device, generator=generator)
    options: dict[str, Any] = {}
    if full:
        tree_kv = torch.randn(2, rows, KV_HEADS, DIM, device=device, generator=generator)
        options = {
            "k_tree": tree_kv[0], "v_tree": tree_kv[1], "lse": torch.zeros(HEADS, rows, device=device).T,
            "sm_scale": 0.3, "zero_tail": True,
        }  # fmt: skip
    arguments = (q, *caches(2, generator), step.handle, torch.zeros_like(q))
    torch.library.opcheck(OPS.tree_attention.default, arguments, options)


def test_opcheck_accept_and_compact_kv(device: torch.device, generator: torch.Generator) -> None:
    step = eager_step(TREES[0], device)
    layout, kv = step.layout, step.kv
    draft, target = torch.randint(0, 2, (2, layout.total_q), device=device, generator=generator)
    result = Accepted(*(torch.zeros_like(it) for it in Accepted.allocate(layout.batch, layout.max_q_len, device)))
    torch.library.opcheck(OPS.accept.default, (*layout.flatten(), draft, target, *result))
    rows, lens, _ = treeattn.accept(layout, draft, target)
    addresses = (kv.page_size, kv.kv_indptr, kv.kv_indices, kv.block_table, kv.tree_slots, kv.kv_start)
    stores = caches(2, generator)
    torch.library.opcheck(OPS.compact_kv_.default, (stores, *addresses, *layout.flatten(), rows, lens))


def test_compaction_in_a_graph_knows_how_wide_the_table_is_now(device: torch.device) -> None:
    """Behind what was copied into a wider one there is room, and no page of the request."""
    own = PagedKV.allocate(1, page_size=2, max_pages_per_request=4, device=device)
    own.copy_(PagedKV(page_size=2, block_table=torch.tensor([[3, 5]], dtype=torch.int32, device=device)))
    layout = TreeLayout.from_parents(torch.tensor([[-1, 0, 0]], device=device), torch.tensor([2], device=device))
    rows, lens = torch.tensor([[0, 2]], device=device), torch.tensor([2], device=device)
    cache = torch.arange(16.0, device=device).view(8, 2, 1, 1).repeat(1, 1, 1, 16)
    before = cache.clone()

    def compact(cache: Tensor) -> None:
        treeattn.compact_kv_([cache], own, layout, rows, lens)

    compiled = torch.compile(compact, fullgraph=True, backend="aot_eager")

    def run() -> None:
        compiled(cache)
        layout.check()  # on a GPU the status word tells it

    with pytest.raises(ValueError, match=r"KV_CAPACITY: request 0: needs 5 cache entries, its part .* has 4"):
        run()
    assert torch.equal(cache, before)


def test_a_step_that_is_gone_is_named(device: torch.device, generator: torch.Generator) -> None:
    step = eager_step(TREES[1], device)
    handle = step.handle
    assert step_of(handle) is step
    twin = copy.copy(step)
    assert twin.handle != handle
    assert step_of(twin.handle) is twin
    q = torch.zeros(4, HEADS, DIM, device=device)
    arguments = (q, *caches(2, generator), handle, torch.empty_like(q))
    OPS.tree_attention(*arguments)
    del step
    gc.collect()
    with pytest.raises(ValueError, match=f"no Step has the handle {handle}.*keep the Step"):
        OPS.tree_attention(*arguments)


def test_operator_takes_every_option(device):
    from treeattn.testing import Options, random_case
    from treeattn.testing.run import call_of, group_of

    options = Options(
        kv_dtype=torch.float8_e4m3fn, scales="heads", window_left=9, logits_soft_cap=3.0, sinks=True, sinks_in_lse=True,
        head_dim_v=32,
    )  # fmt: skip
    case = random_case(3, device=device, batch=2, head_dim=48, tree_kv="logical", options=options)
    step = treeattn.plan(case.layout(), case.kv(), backend="torch", **group_of(case))

    def attend(q, k, v):
        return treeattn.tree_attention(q, k, v, step, **call_of(case))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.q, case.k_cache, case.v_cache), attend(case.q, case.k_cache, case.v_cache))
