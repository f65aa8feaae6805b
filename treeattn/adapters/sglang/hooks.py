"""What the plugin needs of the installed SGLang, checked in its source text before anything is registered.

Every function that the subclass overrides or calls is listed with the parameters it is written for, every attribute
and field with its name. The source is parsed, never imported: SGLang's kernels ask for the GPU when they are imported,
which would open a CUDA context in the launcher, and ``treeattn info --sglang`` must work where SGLang does not import.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .extend_call import PARAMETERS

TESTED = ("0.5.23", "0.5.22")
"""Releases that the adapter's tests have passed with; `make test-adapters` runs the first."""

_TRITON = "srt/layers/attention/triton_backend.py"
_BATCH = "srt/model_executor/forward_batch_info.py"

Kind = Literal["function", "attributes", "fields", "names"]


@dataclass(frozen=True)
class Hook:
    """Something of SGLang that the plugin relies on.

    Attributes
    ----------
    path : str
        Source file inside the package.
    name : str
        A function, ``Class.function``, a class, or "" for the module itself.
    kind : str
        "function": `expected` are all its parameters, in order. "attributes": names that the class sets on itself or
        defines. "fields": names that the class annotates, or members that it assigns. "names": what the module defines
        or imports.
    """

    path: str
    name: str
    kind: Kind
    expected: tuple[str, ...]

    @property
    def title(self) -> str:
        """For a table."""
        module = self.path.removesuffix(".py").removesuffix("/__init__").rsplit("/", 1)[-1]
        return ".".join(filter(None, (module, self.name))) + ("" if self.kind == "function" else f" ({self.kind})")


HOOKS = (
    Hook("srt/plugins/__init__.py", "load_plugins", "function", ()),
    Hook("srt/layers/attention/attention_registry.py", "register_attention_backend", "function", ("name",)),
    Hook("srt/layers/attention/attention_registry.py", "create_triton_backend", "function", ("runner",)),
    Hook(
        _TRITON, "TritonAttnBackend.__init__", "function",
        ("self", "model_runner", "skip_prefill", "kv_indptr_buf", "dllm_fa4"),
    ),
    Hook(_TRITON, "TritonAttnBackend.init_forward_metadata", "function", ("self", "forward_batch")),
    Hook(
        _TRITON, "TritonAttnBackend.init_forward_metadata_out_graph", "function",
        ("self", "forward_batch", "in_capture"),
    ),
    Hook(
        _TRITON, "TritonAttnBackend.init_cuda_graph_state", "function",
        ("self", "max_bs", "max_num_tokens", "kv_indices_buf", "cuda_graph_num_kv_splits_buf"),
    ),
    Hook(
        _TRITON, "TritonAttnBackend._update_target_verify_buffers", "function",
        ("self", "plan", "bs", "seq_lens", "spec_info", "req_pool_indices"),
    ),
    Hook(
        _TRITON, "TritonAttnBackend.update_verify_buffers_to_fill_after_draft", "function",
        ("self", "spec_info", "cuda_graph_bs"),
    ),
    Hook(
        _TRITON, "TritonAttnBackend.forward_extend", "function",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks", "score_mod", "aux_tensors"),
    ),
    Hook(_TRITON, "TritonAttnBackend._forward_extend_kernel", "function", ("self", "layer", "*args", "**kwargs")),
    Hook(
        _TRITON, "TritonAttnBackend._forward_extend_unified", "function",
        ("self", "q", "o", "layer", "forward_batch", "causal", "logits_soft_cap", "sinks", "score_mod", "aux_tensors"),
    ),
    Hook(
        _TRITON, "TritonAttnBackend", "attributes",
        (
            "verify_mask", "_verify_mask", "kv_indptr", "window_kv_indptr", "cuda_graph_kv_indices",
            "cuda_graph_window_kv_indices", "cuda_graph_window_kv_offsets", "sliding_window_size", "token_to_kv_pool",
            "num_draft_tokens", "target_verify_num_tokens_per_req", "max_context_len", "is_draft_runner",
            "skip_prefill", "enable_deterministic", "dcp_size", "use_mla", "device", "forward_metadata",
        ),
    ),
    Hook(
        _TRITON, "ForwardMetadata", "fields",
        ("kv_indptr", "kv_indices", "window_kv_indptr", "window_kv_indices", "window_kv_offsets", "custom_mask"),
    ),
    Hook("kernels/ops/attention/extend_attention.py", "extend_attention_fwd", "function", PARAMETERS),
    Hook("srt/layers/attention/verify_mask.py", "VerifyMask", "fields", ("buffer", "mode", "max_bs", "is_read")),
    Hook("srt/speculative/eagle_utils.py", "", "names", ("TreeMaskMode",)),
    Hook(
        "srt/speculative/eagle_info.py", "EagleVerifyInput", "fields",
        ("draft_token", "custom_mask", "retrieve_index", "draft_token_num", "num_tokens_per_req"),
    ),
    Hook(_BATCH, "ForwardBatch", "fields", ("forward_mode", "req_pool_indices", "seq_lens", "spec_info")),
    Hook(_BATCH, "ForwardMode.is_target_verify", "function", ("self",)),
    Hook(
        "srt/layers/radix_attention.py", "RadixAttention", "attributes",
        (
            "tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "layer_id", "sliding_window_size",
            "attn_type", "is_cross_attention", "xai_temperature_len", "k_scale", "v_scale", "k_scale_float",
            "v_scale_float", "scaling",
        ),
    ),
)  # fmt: skip
"""Everything that :mod:`.backend` and :mod:`.plugin` use."""


@dataclass(frozen=True)
class HookCheck:
    """A hook and what became of it; `problem` is None where it fits."""

    hook: Hook
    problem: str | None


def sglang_root() -> Path | None:
    """Where SGLang is installed, or None; nothing is imported."""
    try:
        spec = importlib.util.find_spec("sglang")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def sglang_version() -> str | None:
    """The installed release, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_hooks(root: Path | None = None, hooks: Sequence[Hook] = HOOKS) -> list[HookCheck]:
    """Compare every hook with the source under `root` (the installed SGLang by default)."""
    root = sglang_root() if root is None else root
    if root is None:
        return [HookCheck(hook, "SGLang is not installed") for hook in hooks]
    return [HookCheck(hook, _problem(root, hook)) for hook in hooks]


def problems(checks: Sequence[HookCheck]) -> list[str]:
    """A line for each hook that does not fit."""
    return [f"{check.hook.title}: {check.problem}" for check in checks if check.problem is not None]


def _problem(root: Path, hook: Hook) -> str | None:
    path = root / hook.path
    if not path.is_file():
        return f"there is no {hook.path}"
    module = ast.parse(path.read_text(encoding="utf-8"))
    if hook.kind == "names":
        return _gone(hook, _names(module))
    found = _find(module, hook.name.split("."))
    if hook.kind == "function":
        if not isinstance(found, ast.FunctionDef):
            return "there is no such function"
        return _parameter_problem(_parameters(found), hook.expected)
    if not isinstance(found, ast.ClassDef):
        return "there is no such class"
    return _gone(hook, _attributes(found) if hook.kind == "attributes" else _fields(found))


def _gone(hook: Hook, held: set[str]) -> str | None:
    gone = [name for name in hook.expected if name not in held]
    return f"it has no {', '.join(gone)}" if gone else None


def _find(tree: ast.AST, names: Sequence[str]) -> ast.AST | None:
    body = getattr(tree, "body", [])
    wanted = (node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == names[0])
    found = next(wanted, None)
    return found if found is None or len(names) == 1 else _find(found, names[1:])


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [arg.arg for arg in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return tuple(names)


def _parameter_problem(found: tuple[str, ...], expected: tuple[str, ...]) -> str | None:
    if found == expected:
        return None
    gone = [name for name in expected if name not in found]
    new = [name for name in found if name not in expected]
    parts = [f"parameters are gone: {', '.join(gone)}"] if gone else []
    parts += [f"parameters are new: {', '.join(new)}"] if new else []
    return "; ".join(parts) or f"parameters have another order: {', '.join(found)}"


def _fields(found: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _names(module: ast.Module) -> set[str]:
    names = {node.name for node in module.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    imports = (node for node in module.body if isinstance(node, (ast.ImportFrom, ast.Import)))
    return names | {alias.asname or alias.name for node in imports for alias in node.names}


def _attributes(found: ast.ClassDef) -> set[str]:
    names = _fields(found) | {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "self" else set()
    return names
