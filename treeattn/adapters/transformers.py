"""Tree verification inside a Hugging Face transformers model.

The model keeps its own projections, rotary embedding and MLP. Its attention is replaced by
:func:`attention_forward`, which writes the new rows' K and V into a :class:`PagedCache` and runs
:func:`treeattn.tree_attention` over prefix and tree. What one forward needs, the step, the cache and the
slots of its rows, travels as one keyword argument of the model's ``forward``::

    cache = PagedCache.for_model(model, max_batch=2, max_tokens=512)
    cache.reserve(0, 512)
    prefill(model, prompt_ids, cache, request=0)  # the model's own attention; K and V copied into pages
    with attention_implementation(model, register()):
        logits = verify(model, tokens, layout, TreeContext(step, cache, cache.node_slots(layout)))

Rotary positions are ``layout.positions`` (prefix length + depth), so siblings share a position while each has
a slot of its own. It serves models that go through transformers' attention interface with plain softmax
attention: Llama and its relatives. Not here: prefill kernels, sampling, and layers with a sliding window,
sinks or a logit soft cap, which are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

import treeattn
from treeattn import PagedKV, TreeLayout

IMPLEMENTATION = "treeattn"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class PagedCache:
    """K and V of every layer in pages, and the block table that says which page is whose.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Geometry; every layer has the same.
    num_pages : int
        Pages to share among the requests. One more page is allocated and never listed in a table: padding
        rows write there.
    max_batch, max_pages : int
        Rows and width of the block table.
    page_size : int
        Tokens a page.
    dtype, device
        Of the cache tensors; the block table is int32 on the same device.
    seed : int, optional
        Hand pages out in a shuffled order, so that neighbouring tokens lie on unrelated pages. None:
        ascending.
    fill : float
        What unwritten slots hold. Tests pass NaN: nothing may read them.

    Attributes
    ----------
    keys, values : list of Tensor
        One ``[num_pages + 1, page_size, num_kv_heads, head_dim]`` tensor a layer.
    block_table : Tensor
        int32 ``[max_batch, max_pages]``; entries past a request's pages name the spare page.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_pages: int,
        max_batch: int,
        max_pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        fill: float = 0.0,
    ) -> None:
        if min(num_pages, max_batch, max_pages, page_size) < 1:
            raise ValueError(
                f"num_pages, max_batch, max_pages and page_size must be at least 1, "
                f"got {num_pages}, {max_batch}, {max_pages} and {page_size}"
            )
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.keys = [torch.full(shape, fill, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.full(shape, fill, dtype=dtype, device=device) for _ in range(num_layers)]
        self.block_table = torch.full((max_batch, max_pages), num_pages, dtype=torch.int32, device=device)
        if seed is None:
            order = list(range(num_pages))
        else:
            order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self._free = order[::-1]
        self._owned: list[list[int]] = [[] for _ in range(max_batch)]

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        max_batch: int,
        max_tokens: int,
        page_size: int = 16,
        seed: int | None = None,
        fill: float = 0.0,
    ) -> PagedCache:
        """Make a cache for `max_batch` requests of up to `max_tokens` tokens, as the model needs it."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pages = -(-max_tokens // page_size)
        return cls(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim,
            num_pages=max_batch * pages,
            max_batch=max_batch,
            max_pages=pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
            seed=seed,
            fill=fill,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Every K and V tensor, as :func:`treeattn.compact_kv_` takes them."""
        return [*self.keys, *self.values]

    def reserve(self, request: int, num_tokens: int) -> None:
        """Give a request pages for its first `num_tokens` tokens, those it already has included.

        Raises
        ------
        ValueError
            If the table is too narrow or too few pages are free; both numbers are named.
        """
        owned = self._owned[request]
        wanted = -(-num_tokens // self.page_size)
        if wanted > self.block_table.shape[1]:
            raise ValueError(f"request {request} needs {wanted} pages, its table row holds {self.block_table.shape[1]}")
        missing = wanted - len(owned)
        if missing > len(self._free):
            raise ValueError(f"request {request} needs {missing} more pages, {len(self._free)} are free")
        if missing > 0:
            owned.extend(self._free.pop() for _ in range(missing))
            self.block_table[request, : len(owned)] = torch.tensor(owned, dtype=torch.int32)

    def release(self, request: int) -> None:
        """Take a request's pages back."""
        self._free.extend(reversed(self._owned[request]))
        self._owned[request] = []
        self.block_table[request].fill_(self.num_pages)

    def write_prompt(self, request: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy the first tokens of a request into its pages.

        Parameters
        ----------
        request, layer : int
        keys, values : Tensor
            ``[tokens, num_kv_heads, head_dim]``.
        """
        tokens = keys.shape[0]
        capacity = len(self._owned[request]) * self.page_size
        if tokens > capacity:
            raise ValueError(f"request {request} has pages for {capacity} tokens, the prompt has {tokens}")
        position = torch.arange(tokens, device=keys.device)
        page = self.block_table[request].long()[position // self.page_size]
        self._write(layer, page * self.page_size + position % self.page_size, keys, values)

    def kv(self, block_table: Tensor | None = None) -> PagedKV:
        """Return the addresses of every request, or of those whose table rows are given."""
        return PagedKV(page_size=self.page_size, block_table=self.block_table if block_table is None else block_table)

    def node_slots(self, layout: TreeLayout, block_table: Tensor | None = None) -> Tensor:
        """Compute the token slot each row writes its K and V to; capturable.

        Parameters
        ----------
        layout : TreeLayout
        block_table : Tensor, optional
            Table rows of the layout's requests, ``[batch, max_pages]``. Default: all of them.

        Returns
        -------
        Tensor
            int64 ``[total_q]``: the slot of logical position ``prefix_len + row`` for a node, a slot of the
            spare page for padding.
        """
        table = self.block_table if block_table is None else block_table
        flat = torch.arange(layout.total_q, device=table.device)
        request = layout.row_request.clamp(min=0).long()
        row = flat - layout.qo_indptr.long()[request]
        position = layout.prefix_lens.long()[request] + row
        page = table.long()[request, (position // self.page_size).clamp(max=table.shape[1] - 1)]
        slot = page * self.page_size + position % self.page_size
        is_node = (layout.row_request >= 0) & (row < layout.num_nodes.long()[request])
        return torch.where(is_node, slot, self.num_pages * self.page_size + flat % self.page_size)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write K and V ``[rows, num_kv_heads, head_dim]`` to token slots (int64 ``[rows]``); capturable."""
        self._write(layer, slots, keys, values)

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys.detach())
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values.detach())


@dataclass(frozen=True, eq=False)
class TreeContext:
    """What the attention of one forward pass needs beside q, K and V.

    Attributes
    ----------
    step
        From :func:`treeattn.plan`, or a group of :class:`treeattn.StaticBuffers`.
    cache : PagedCache
    slots : Tensor
        int64 ``[total_q]``, where each row's K and V go (:meth:`PagedCache.node_slots`).
    """

    step: Any
    cache: PagedCache
    slots: Tensor


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_context: TreeContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over a paged prefix and the rows' ancestors, as an attention function of transformers.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its ``layer_idx`` selects the cache tensors.
    query : Tensor
        ``[1, num_qo_heads, total_q, head_dim]``, or ``[batch, num_qo_heads, q_len, head_dim]`` of a uniform
        layout.
    key, value : Tensor
        The same with ``num_kv_heads``; rotary embedding already applied.
    attention_mask : Tensor, optional
        Must be None: who sees whom is the step's business.
    scaling : float, optional
        Softmax scale, default ``1 / sqrt(head_dim)``.
    dropout : float
        Must be 0.
    tree_context : TreeContext
        Passed to the model's ``forward`` under this name.

    Returns
    -------
    out : Tensor
        ``[1, total_q, num_qo_heads, head_dim]`` (or ``[batch, q_len, ...]``).
    weights : None
    """
    if tree_context is None:
        raise ValueError("the treeattn attention needs model(..., tree_context=TreeContext(step, cache, slots))")
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask must be None, the step holds the mask; got shape {tuple(attention_mask.shape)}"
        )
    if dropout:
        raise NotImplementedError(f"dropout {dropout} in verification; call model.eval()")
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if asked:
        raise NotImplementedError(
            f"layer {module.layer_idx} asks for {', '.join(asked)}; plain softmax attention is supported"
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cache, slots = tree_context.cache, tree_context.slots
    if q.shape[0] != slots.shape[0]:
        raise ValueError(f"the forward has {q.shape[0]} rows, tree_context.slots has {slots.shape[0]}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache.write(layer, slots, k, v)
    out = treeattn.tree_attention(
        q.contiguous(),
        cache.keys[layer],
        cache.values[layer],
        tree_context.step,
        sm_scale=scaling,
    )
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def register(name: str = IMPLEMENTATION) -> str:
    """Make :func:`attention_forward` known to transformers under `name` and return the name."""
    AttentionInterface.register(name, attention_forward)
    return name


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Run the model with another attention implementation inside a ``with`` block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def prefill(model: Any, input_ids: Tensor, cache: PagedCache, request: int) -> Tensor:
    """Run a prompt through the model's own attention and copy its K and V into the request's pages.

    Parameters
    ----------
    model
        A causal language model set to one of transformers' own attention implementations.
    input_ids : Tensor
        int64 ``[tokens]``.
    cache : PagedCache
        Pages for the prompt must be reserved.
    request : int
        Row of the block table.

    Returns
    -------
    Tensor
        Logits ``[tokens, vocab]``.
    """
    output = model(input_ids=input_ids[None], use_cache=True)
    # transformers renamed the field in 5.2x; only the one that was set is a key.
    filled = output["cache"] if "cache" in output else output["past_key_values"]
    for layer, entry in enumerate(filled.layers):
        cache.write_prompt(request, layer, entry.keys[0].transpose(0, 1), entry.values[0].transpose(0, 1))
    return output.logits[0]  # type: ignore[no-any-return]


def verify(model: Any, tokens: Tensor, layout: TreeLayout, context: TreeContext) -> Tensor:
    """Run the target model over the rows of a step; capturable.

    Parameters
    ----------
    model
        A causal language model set to this module's attention (:func:`register`,
        :func:`attention_implementation`).
    tokens : Tensor
        int64 ``[total_q]``: root and draft tokens; any valid id in padding rows.
    layout : TreeLayout
    context : TreeContext

    Returns
    -------
    Tensor
        Logits ``[total_q, vocab]``.
    """
    output = model(
        input_ids=tokens[None],
        position_ids=layout.positions[None],
        use_cache=False,
        tree_context=context,
    )
    return output.logits[0]  # type: ignore[no-any-return]
