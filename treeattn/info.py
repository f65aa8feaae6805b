"""``treeattn info``: versions, the GPU, which backends work, and what a geometry gets."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

__all__ = ["DEFAULT_GEOMETRIES", "gather", "geometry_info", "parse_geometry", "render"]

DEFAULT_GEOMETRIES = ("32/8/128", "64/8/128", "8/1/128", "9/3/64")


def parse_geometry(text: str) -> tuple[int, int, int]:
    """Parse ``"32/8/128"``: query heads, KV heads, head dim.

    Raises
    ------
    ValueError
        If the text has another form or the heads do not divide.
    """
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"a geometry is QO_HEADS/KV_HEADS/HEAD_DIM such as 32/8/128, got {text!r}")
    qo, kv, dim = map(int, parts)
    if not (kv and dim and qo and qo % kv == 0):
        raise ValueError(f"{text}: {qo} query heads must be a multiple of {kv} KV heads, all positive")
    return qo, kv, dim


def geometry_info(
    geometry: tuple[int, int, int], q_len: int, dtype: str, arch: int, sms: int, page_tokens: int = 4096
) -> dict[str, Any]:
    """Kernel, tile, split and merge of one geometry on a chip.

    Parameters
    ----------
    geometry : tuple
        Query heads, KV heads, head dim.
    q_len : int
        Declared max_q_len.
    arch, sms : int
        Compute capability times ten (0: no GPU) and multiprocessors.
    page_tokens : int
        Prefix length for the example of a split.
    """
    import torch

    import treeattn

    qo, kv, dim = geometry
    if not 1 <= dim <= 256 or kv < 1 or qo % kv:
        raise ValueError(f"geometry {qo}/{kv}/{dim}: query heads must be a multiple of KV heads, head_dim 1 to 256")
    group, rows = qo // kv, qo // kv * q_len
    config = treeattn.select_config(arch, getattr(torch, dtype), group, dim, q_len)
    programs = sms * config.programs_per_sm
    row_tiles = -(-rows // config.block_m)
    kv_tiles = -(-page_tokens // config.block_n) + -(-q_len // config.block_n)
    items = row_tiles * kv
    share = max(-(-items * kv_tiles // programs) if programs else kv_tiles, config.min_share)
    return {
        "geometry": f"{qo}/{kv}/{dim}",
        "q_len": q_len,
        "dtype": dtype,
        "packed_rows": rows,
        "row_tiles": row_tiles,
        "tile": {key: value for key, value in asdict(config).items() if key != "reason"},
        "reason": config.reason,
        "programs": programs,
        "kv_tiles": kv_tiles,
        "example_prefix": page_tokens,
        "tiles_per_program": share,
        "splits": -(-kv_tiles // share) if kv_tiles else 1,
        "merge": "partials in float32, merged in split order by a second launch"
        if share < kv_tiles
        else "none: one split",
    }


def gather(
    geometries: tuple[str, ...] = DEFAULT_GEOMETRIES,
    q_len: int = 17,
    dtype: str = "bfloat16",
    arch: int | None = None,
) -> dict[str, Any]:
    """Everything that `info` prints, as plain data.

    Parameters
    ----------
    arch : int, optional
        Describe another chip than the one here, e.g. 90.
    """
    import torch

    import treeattn

    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    found: dict[str, Any] = {
        "treeattn": treeattn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": triton_version,
        "gpu": None,
        "backends": {"cpu": treeattn.available_backends("cpu")},
    }
    chip, sms = 90, 132
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        chip, sms = properties.major * 10 + properties.minor, properties.multi_processor_count
        found["gpu"] = {
            "name": properties.name,
            "arch": chip,
            "sms": sms,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    found["backends"]["cuda"] = treeattn.available_backends("cuda")
    described = chip if arch is None else arch
    found["kernels_for"] = {
        "arch": described,
        "sms": sms,
        "here": found["gpu"] is not None and described == chip,
    }
    found["geometries"] = [geometry_info(parse_geometry(text), q_len, dtype, described, sms) for text in geometries]
    return found


def render(found: dict[str, Any]) -> str:
    """The same as text."""
    lines = [
        f"treeattn {found['treeattn']}, Python {found['python']}, torch {found['torch']} (CUDA {found['torch_cuda']}), "
        f"Triton {found['triton']}"
    ]
    gpu = found["gpu"]
    lines.append(
        f"GPU: {gpu['name']}, sm_{gpu['arch']}, {gpu['sms']} multiprocessors, {gpu['memory_gib']} GiB"
        if gpu
        else "GPU: none"
    )
    for device, backends in found["backends"].items():
        lines.append(f"backends on {device}:")
        lines += [f"  {name:10} {'works' if reason is None else 'no: ' + reason}" for name, reason in backends.items()]
    chip = found["kernels_for"]
    where = "this GPU" if chip["here"] else "not here"
    lines.append(f"triton kernels on sm_{chip['arch']} with {chip['sms']} multiprocessors ({where}):")
    for one in found["geometries"]:
        tile = ", ".join(f"{key} {value}" for key, value in one["tile"].items())
        lines += [
            f"  {one['geometry']} {one['dtype']}, q_len {one['q_len']}: {one['packed_rows']} packed rows in "
            f"{one['row_tiles']} row tile(s) a KV head",
            f"    tile:  {tile}",
            f"    why:   {one['reason']}",
            f"    split: one request of {one['example_prefix']} tokens: {one['kv_tiles']} KV tiles, about "
            f"{one['tiles_per_program']} to each of {one['programs']} programs, so {one['splits']} split(s)",
            f"    merge: {one['merge']}",
        ]
    return "\n".join(lines)
