"""The draft tree of each request, from the drafter that makes it to the step that verifies it.

vLLM hands an attention backend no tree and no request id, only the slot that a request has in the runner's table. So a
drafter puts its trees here, by slot and request id, and the metadata builder takes them in the next step. A tree is
used at most once, by the first step in which its slot appears, and only if the slot still holds the request that it was
made for: whatever is stale is a chain.

A chain in place of a tree is slower, never wrong: attention, positions and the acceptance walk all read one layout, and
any layout in which a parent comes before its child verifies its tokens exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_current: DraftTrees | None = None


class DraftTrees:
    """Trees of the requests of one runner, in memory of fixed addresses.

    Parameters
    ----------
    max_reqs : int
        Slots of the runner's request table (``max_num_seqs``).
    max_q_len : int
        Rows of a verify step at most, the root included: ``1 + num_speculative_tokens``.
    request_at : callable
        The id of the request that a slot holds now, None for an empty slot. On the V2 runner
        ``req_states.index_to_req_id.get``.
    device : torch.device or str

    Attributes
    ----------
    parents : Tensor int32 [max_reqs + 1, max_q_len]
        Row `s` is the tree of slot `s`, the last row a chain.
    num_nodes : Tensor int32 [max_reqs + 1]
        Real nodes, the root included.

    Examples
    --------
    >>> trees = DraftTrees(8, 5, request_at={3: "request-a"}.get, device="cpu")
    >>> trees.put([3], ["request-a"], torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32))
    >>> trees.install()  # metadata builders of this process take from it
    """

    def __init__(
        self, max_reqs: int, max_q_len: int, *, request_at: Callable[[int], str | None], device: torch.device | str
    ) -> None:
        for name, value in (("max_reqs", max_reqs), ("max_q_len", max_q_len)):
            if value < 1:
                raise ValueError(f"{name} is {value}, must be 1 or more")
        self.max_reqs = max_reqs
        self.max_q_len = max_q_len
        self.request_at = request_at
        chain = torch.arange(-1, max_q_len - 1, dtype=torch.int32, device=device)
        self.parents = chain.repeat(max_reqs + 1, 1)
        self.num_nodes = torch.full((max_reqs + 1,), max_q_len, dtype=torch.int32, device=device)
        self._pending: dict[int, str] = {}
        self._rows = torch.arange(max_reqs * max_q_len, dtype=torch.int32, device=device)
        self._step: Sequence[int] | None = None
        self._sources: Tensor | None = None

    def install(self) -> None:
        """Make every metadata builder of this process take its trees from here (a worker process has one runner)."""
        global _current
        _current = self

    def put(
        self, slots: Sequence[int], requests: Sequence[str], parents: Tensor, num_nodes: Tensor | None = None
    ) -> None:
        """Hand over the trees that the next step verifies; a tree that was not taken yet is replaced.

        Parameters
        ----------
        slots : sequence of int
            Where each request is in the runner's table (``input_batch.idx_mapping_np``).
        requests : sequence of str
            Their ids (``input_batch.req_ids``).
        parents : Tensor int32 or int64 [len(slots), width]
            Parent of each node, the root (the last sampled token, -1) first, parents before children; at most
            `max_q_len` wide. Copied, on the current stream.
        num_nodes : Tensor int32 or int64 [len(slots)], optional
            Real nodes of each, the root included; all when missing.

        Raises
        ------
        ValueError, TypeError
            If the shapes disagree or exceed the capacity; both numbers are named and nothing has been written.
        """
        count = len(slots)
        if len(requests) != count:
            raise ValueError(f"{count} slots, but {len(requests)} requests")
        if parents.dim() != 2 or parents.shape[0] != count:
            raise ValueError(f"parents: expected [slots, nodes] = [{count}, ...], got {list(parents.shape)}")
        width = parents.shape[1]
        if not 1 <= width <= self.max_q_len:
            raise ValueError(
                f"trees of {width} nodes do not fit a verify width of 1 to {self.max_q_len} rows (the root and "
                f"{self.max_q_len - 1} draft tokens)"
            )
        if num_nodes is not None and tuple(num_nodes.shape) != (count,):
            raise ValueError(f"num_nodes: expected [slots] = [{count}], got {list(num_nodes.shape)}")
        for name, given in (("parents", parents), ("num_nodes", num_nodes)):
            if given is not None and given.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be int32 or int64, got {given.dtype}")
            if given is not None and given.device != self.parents.device:
                raise ValueError(f"{name} is on {given.device}, the trees are on {self.parents.device}")
        places = [int(slot) for slot in slots]
        if outside := [slot for slot in places if not 0 <= slot < self.max_reqs]:
            raise ValueError(f"slot {outside[0]} is outside the {self.max_reqs} slots of the runner")
        if len(set(places)) != count:
            raise ValueError(f"a slot occurs twice in {places}")
        at = self._on_device(places)
        self.parents[at, :width] = parents.to(torch.int32)
        # a tree has its root, whatever a drafter that found nothing says
        if num_nodes is None:
            self.num_nodes.index_fill_(0, at, width)  # by [] a number is copied from the host, and waited for
        else:
            self.num_nodes[at] = num_nodes.clamp(1, width).to(torch.int32)
        self._pending.update(zip(places, requests, strict=True))

    def take(self, slots: Sequence[int], verifying: Sequence[bool]) -> Tensor | None:
        """Say whose tree each request of a step has; what a slot of the step held is used up.

        Parameters
        ----------
        slots : sequence of int
            Slot of each request of the batch, in its order. The object itself stands for the step: builders of several
            KV cache groups call with the same one and get the same answer.
        verifying : sequence of bool
            Whether the request verifies draft tokens in this step. If not (a prefill), its tree is dropped.

        Returns
        -------
        Tensor int64 [max_reqs] or None
            Row of `parents` for each request of the batch, the chain's row where it has no tree and past the batch;
            None if all are chains.
        """
        if slots is not self._step:
            self._step = slots
            chain = self.max_reqs
            rows = [chain] * chain
            for row, (slot, wanted) in enumerate(zip(slots, verifying, strict=True)):
                request = self._pending.pop(int(slot), None)
                if request is not None and wanted and request == self.request_at(int(slot)):
                    rows[row] = int(slot)
            some = any(row != chain for row in rows)
            self._sources = self._on_device(rows) if some else None
        return self._sources

    def _on_device(self, values: list[int]) -> Tensor:
        """An int64 tensor, copied without waiting for the stream."""
        device = self.parents.device
        host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def gather(self, sources: Tensor, query_start_loc: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The trees of a batch, cut to its query rows: any first rows of a tree are a tree.

        Parameters
        ----------
        sources : Tensor int64 [batch]
            From :meth:`take`.
        query_start_loc : Tensor int32 [batch + 1]
            Row offsets, on the device; only the device knows them under adaptive verification.
        rows : int
            Query rows of the batch, padding behind the last request included.

        Returns
        -------
        parents : Tensor int32 [rows]
        num_nodes : Tensor int32 [batch]
            At most the query rows of the request; rows beyond the tree are padding.
        """
        row = self._rows[:rows]
        request = torch.searchsorted(query_start_loc[1:], row, right=True).clamp_(max=len(sources) - 1)
        local = (row - query_start_loc[request]).clamp_(0, self.max_q_len - 1)
        return self.parents[sources[request], local], torch.minimum(self.num_nodes[sources], query_start_loc.diff())


def current_trees() -> DraftTrees | None:
    """What :meth:`DraftTrees.install` made the trees of this process; None where no tree drafter runs."""
    return _current
