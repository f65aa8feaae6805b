"""What this adapter uses of vLLM, with the signature it expects, and whether the installed vLLM has it.

vLLM's attention classes are no stable interface. Each hook is looked up and compared by the names of its parameters or
fields; :func:`require` refuses to start the backend where one differs, and ``treeattn info --vllm`` prints the table.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

VERSION = "0.33.0"

_V1 = "vllm.v1.attention"
_TRITON = f"{_V1}.backends.triton_attn"
_RUNNER = "vllm.v1.worker.gpu"


class Hook(NamedTuple):
    """One thing of vLLM that the adapter calls, overrides or reads.

    Attributes
    ----------
    where : str
        ``module:qualified.name``.
    expects : tuple of str or None
        Parameter names of a function in order; of a dataclass, the fields that are read. None: it exists.
    trees : bool
        Only trees need it, not the backend.
    """

    where: str
    expects: tuple[str, ...] | None = None
    trees: bool = False


class Found(NamedTuple):
    """A hook as the installed vLLM has it.

    Attributes
    ----------
    hook : Hook
    found : str
        Its parameters or fields, or why there are none.
    matches : bool
    """

    hook: Hook
    found: str
    matches: bool


HOOKS = (
    Hook(f"{_V1}.backends.registry:register_backend", ("backend", "class_path", "is_mamba")),
    Hook(f"{_V1}.backends.registry:AttentionBackendEnum.CUSTOM"),
    Hook(f"{_TRITON}:TritonAttentionBackend.get_builder_cls", ()),
    Hook(f"{_TRITON}:TritonAttentionBackend.get_impl_cls", ()),
    Hook(
        f"{_V1}.backend:AttentionBackend.supports_combination",
        ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix",
         "device_capability"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionMetadataBuilder.__init__",
        ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionMetadataBuilder.build_for_drafting",
        ("self", "common_attn_metadata", "draft_index"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionMetadataBuilder.get_varlen_cudagraph_max_query_len", ("vllm_config", "kv_cache_spec")
    ),
    Hook(f"{_TRITON}:TritonAttentionMetadataBuilder._cudagraph_support"),
    Hook(
        f"{_TRITON}:TritonAttentionMetadataBuilder._init_reorder_batch_threshold",
        ("self", "reorder_batch_threshold", "supports_spec_as_decode", "supports_dcp_with_varlen"),
    ),
    Hook(f"{_TRITON}:TritonAttentionMetadataBuilder.requires_block_table_width"),
    Hook(f"{_TRITON}:TritonAttentionMetadataBuilder.supports_draft_decode_metadata_update"),
    Hook(
        f"{_TRITON}:TritonAttentionImpl.__init__",
        ("self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
         "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks", "use_alibi_sqrt", "chunk_lookback"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
         "output_block_scale"),
    ),
    Hook(
        f"{_TRITON}:TritonAttentionImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    Hook(f"{_TRITON}:TritonAttentionImpl.fused_output_quant_supported", ("self", "quant_key")),
    Hook(
        f"{_TRITON}:TritonAttentionMetadata",
        ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "block_table", "slot_mapping", "causal"),
    ),
    Hook(
        f"{_V1}.backend:CommonAttentionMetadata",
        ("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
         "block_table_tensor", "slot_mapping", "causal", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx"),
    ),
    Hook(
        f"{_V1}.backends.utils:split_decodes_and_prefills",
        ("common_attn_metadata", "decode_threshold", "require_uniform", "treat_short_extends_as_decodes"),
    ),
    Hook("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.is_draft_layer"),
    Hook(f"{_RUNNER}.spec_decode:init_speculator", ("vllm_config", "device", "req_states"), trees=True),
    Hook(
        f"{_RUNNER}.model_states.interface:ModelState.prepare_attn",
        ("self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config",
         "for_capture", "ubatch_idx"),
        trees=True,
    ),
    Hook(
        f"{_RUNNER}.model_states.interface:ModelState.prepare_inputs", ("self", "input_batch", "req_states"), trees=True
    ),
    Hook(
        f"{_RUNNER}.model_states.interface:ModelState.prepare_dummy_inputs", ("self", "num_reqs", "num_tokens"),
        trees=True,
    ),
    Hook(f"{_RUNNER}.model_states.interface:ModelState.custom_sampler", ("self", "sampler"), trees=True),
    Hook(
        f"{_RUNNER}.input_batch:InputBatch",
        ("req_ids", "idx_mapping", "idx_mapping_np", "query_start_loc", "seq_lens", "input_ids", "positions",
         "logits_indices", "cu_num_logits"),
        trees=True,
    ),
    Hook(
        f"{_RUNNER}.input_batch:get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
        trees=True,
    ),
)  # fmt: skip


def installed_version() -> str | None:
    """The version of the installed vLLM; None where there is none."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def look_up(hook: Hook) -> Found:
    """Compare one hook with the installed vLLM, whose module is imported."""
    module, _, name = hook.where.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        return Found(hook, f"missing: {error}", False)
    if hook.expects is None:
        return Found(hook, "there", True)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        lacks = [name for name in hook.expects if name not in names]
        return Found(hook, f"has no {', '.join(lacks)}" if lacks else "has them", not lacks)
    try:
        names = list(inspect.signature(value).parameters)
    except (TypeError, ValueError) as error:
        return Found(hook, f"no signature: {error}", False)
    return Found(hook, f"({', '.join(names)})", tuple(names) == hook.expects)


def look_up_all(hooks: Iterable[Hook] = HOOKS) -> list[Found]:
    """Every hook as the installed vLLM has it."""
    return [look_up(hook) for hook in hooks]


def require() -> None:
    """Raise ImportError, with every difference, unless this vLLM has what the backend needs."""
    wrong = [one for one in look_up_all(hook for hook in HOOKS if not hook.trees) if not one.matches]
    if wrong:
        raise ImportError(
            f"treeattn's backend was made for vLLM {VERSION}, and {installed_version()} differs from it: "
            + "; ".join(f"{one.hook.where} expected {_wanted(one.hook)}, found {one.found}" for one in wrong)
            + ". Leave --attention-backend CUSTOM out, or install the version above; treeattn info --vllm shows all."
        )


def _wanted(hook: Hook) -> str:
    return "to be there" if hook.expects is None else f"({', '.join(hook.expects)})"


def render(found: Iterable[Found]) -> str:
    """The table of ``treeattn info --vllm``."""
    lines = [f"vLLM {installed_version()}; the adapter was made for {VERSION}"]
    for one in found:
        lines.append(f"  {'matches' if one.matches else 'DIFFERS'}  {one.hook.where}  {_wanted(one.hook)}")
        if not one.matches:
            lines.append(f"           found {one.found}" + (" (only trees need it)" if one.hook.trees else ""))
    return "\n".join(lines)
