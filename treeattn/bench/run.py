"""Run workloads through providers: gate, time, rows of JSON, a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .calls import Calls, empty_out, group_args, kv_of, layer_call
from .gate import GateError, gate
from .inputs import COLD_BYTES, Inputs
from .providers import PROVIDERS, unavailable, unsuited
from .timing import Timing, measure_ceilings, time_calls, time_graph, time_host
from .workloads import Workload

__all__ = ["environment", "run_workloads", "save"]

Progress = Callable[[str], None]


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def environment(device: torch.device) -> dict[str, Any]:
    """What a number depends on: GPU, driver, versions, revision (or ``TREEATTN_GIT_REV``), date."""
    import treeattn

    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    on_gpu = device.type == "cuda"
    here = str(Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "sms": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "treeattn": treeattn.__version__,
        "git_rev": os.environ.get("TREEATTN_GIT_REV") or _output_of("git", "-C", here, "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _shape(work: Workload, provider: str) -> dict[str, Any]:
    """What a row says about its workload; `page_size_asked` is the workload's, `page_size` what the provider took."""
    row = {
        "kind": work.kind,
        "batch": work.batch,
        "q_len": work.q_len,
        "prefix": work.prefix,
        "qo_heads": work.qo_heads,
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "page_size": work.page_size,
        "page_size_asked": work.page_size,
        "kv_layout": work.kv_layout,
        "dtype": work.dtype,
        "kv_dtype": work.cache_dtype,
        "provider": provider,
    }
    if work.prefixes is not None:
        row["prefixes"] = list(work.prefixes)
    if work.q_lens is not None:
        row["q_lens"] = list(work.q_lens)
    usual = Workload(work.kind, work.batch, work.q_len, work.prefix)
    for field in ("nodes", "head_dim_v", "shared_kv", "window_left", "layers"):
        if getattr(work, field) != getattr(usual, field):
            row[field] = getattr(work, field)
    return row


def _row(work: Workload, provider: str, page_size: int, timing: Timing, rel_err: float | None) -> dict[str, Any]:
    return {
        **_shape(work, provider),
        "page_size": page_size,
        "us": round(timing.us, 3),
        "p20": round(timing.p20, 3),
        "p80": round(timing.p80, 3),
        "floor_us": round(work.floor_us, 3),
        "rel_err": rel_err,
        "bytes": work.bytes,
        "flop": work.flop,
    }


def _measure(provider: str, inputs: Inputs) -> list[dict[str, Any]]:
    """The best variant's row. Every variant passes the gate."""
    best: tuple[Timing, Calls, float] | None = None
    for variant in PROVIDERS[provider](inputs):
        rel_err = gate(provider, inputs, variant)
        timing = time_calls(variant.calls, inputs.device)
        if best is None or timing.us < best[0].us:
            best = (timing, variant, rel_err)
    if best is None:
        raise RuntimeError(f"{provider} offers nothing for {inputs.workload.name()} and does not say why")
    return [_row(inputs.workload, provider, best[1].page_size, best[0], best[2])]


def _measure_step(inputs: Inputs, backend: str) -> list[dict[str, Any]]:
    """Cost of a step: `update_` with one plan (GPU time inside a graph), and a call (host time)."""
    import treeattn

    work, device = inputs.workload, inputs.device
    paged = inputs.paged(work.page_size, work.kv_layout)
    kv = kv_of(paged, inputs.lengths)
    bufs = treeattn.StaticBuffers(work.batch, max(work.all_q_lens), work.total_q, device=device)
    step = bufs.add_group(kv=kv, backend=backend, **group_args(inputs))
    args = inputs.layout_args()
    bufs.update_(**args)
    out = empty_out(inputs)
    attend = layer_call(inputs, step, paged.k[0], paged.v[0], out)
    rel_err = gate(f"treeattn_{backend}", inputs, Calls([attend], "tree", paged, work.page_size, out))

    def update() -> None:
        bufs.update_(**args)

    on_gpu = device.type == "cuda"
    update_time = time_graph([update] * 20) if on_gpu else time_calls([update], device)
    host_update = time_host(update, 100, torch.cuda.synchronize if on_gpu else None)
    host = time_host(attend, 300 if on_gpu else 3, torch.cuda.synchronize if on_gpu else None)
    rows = []
    for kind, timing in (
        ("step-update", update_time),
        ("step-update-host", host_update),
        ("step-call-host", host),
    ):
        row = _row(work, f"treeattn_{backend}", work.page_size, timing, rel_err)
        rows.append({**row, "kind": kind, "floor_us": 0.0, "bytes": 0, "flop": 0})
    return rows


def _device_lost(device: torch.device) -> bool:
    """Whether a fault has made the CUDA context useless for whoever comes next."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def run_workloads(
    workloads: Sequence[Workload],
    providers: Sequence[str],
    device: torch.device,
    *,
    cold_bytes: float = COLD_BYTES,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure every provider on every workload.

    A provider that computes something wrong, or fails in any other way, has no number for that workload; the other
    rows keep theirs. `keep` is given the result so far after each workload: a run may be cut short.

    Returns
    -------
    dict
        ``env``, on a GPU with its measured ceilings; ``rows``, each with kind, batch, q_len, prefix, qo_heads,
        kv_heads, page_size, kv_dtype, provider, us, p20, p80, floor_us, rel_err and more; ``failed``, rows of the same
        shape with `error` in place of times; ``skipped``, likewise with `reason`: the workload is not for the
        provider; ``left_out``, reasons by provider: it cannot run here, or no workload is for it.
    """
    left_out = {name: reason for name in providers if (reason := unavailable(name, device, workloads)) is not None}
    usable = [name for name in providers if name not in left_out]
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    lost: str | None = None
    env = environment(device)
    if device.type == "cuda":
        env |= measure_ceilings(device)
    result = {"env": env, "left_out": left_out, "failed": failed, "skipped": skipped, "rows": rows}
    for index, work in enumerate(workloads):
        inputs = None
        for name in usable:
            if (reason := unsuited(name, work)) is not None:
                skipped.append({**_shape(work, name), "reason": reason})
                continue
            if lost is not None:
                failed.append({**_shape(work, name), "error": lost})
                continue
            try:
                if inputs is None:
                    inputs = Inputs(work, device, cold_bytes if device.type == "cuda" else 0)
                if work.kind == "step":
                    rows += _measure_step(inputs, name.removeprefix("treeattn_"))
                else:
                    rows += _measure(name, inputs)
            except Exception as error:  # of another project's code: any kind
                text = str(error) if isinstance(error, GateError) else f"{type(error).__name__}: {error}"
                failed.append({**_shape(work, name), "error": text})
                if _device_lost(device):
                    lost = f"not run: {name} on {work.name()} left the device unusable"
        if progress:
            progress(f"[{index + 1}/{len(workloads)}] {work.name()}")
        if keep:
            keep(result)
    return result


def save(result: dict[str, Any], path: str | Path) -> None:
    """Write a result as JSON, one row a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
