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
    geometry: tuple[int, int, int],
    q_len: int,
    dtype: str,
    arch: int,
    sms: int,
    page_tokens: int = 4096,
    cuda_works: bool = True,
) -> dict[str, Any]:
    """What ``"auto"`` takes for one geometry on a chip, and Triton's kernel, tile, split and merge.

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
    cuda_works : bool
        Whether the CUDA kernels' code is there, or a compiler of it.
    """
    import torch

    import treeattn

    from .backends import choose_backend
    from .capabilities import Asked
    from .cuda.config import cuda_config
    from .geometry import Geometry

    qo, kv, dim = geometry
    if not 1 <= dim <= 256 or kv < 1 or qo % kv:
        raise ValueError(f"geometry {qo}/{kv}/{dim}: query heads must be a multiple of KV heads, head_dim 1 to 256")
    group, rows = qo // kv, qo // kv * q_len
    config = treeattn.select_config(arch, getattr(torch, dtype), group, dim, q_len)
    asked = Asked(Geometry.of(qo, kv, dim, dtype=getattr(torch, dtype)))
    auto = choose_backend("cuda", arch, asked, cuda_works=cuda_works)
    programs = sms * config.programs_per_sm
    row_tiles = -(-rows // config.block_m)
    kv_tiles = -(-page_tokens // config.block_n) + -(-q_len // config.block_n)
    items = row_tiles * kv
    share = max(-(-items * kv_tiles // programs) if programs else kv_tiles, config.min_share)
    return {
        "geometry": f"{qo}/{kv}/{dim}",
        "auto": auto,
        "auto_reason": cuda_config(asked.geometry, q_len).reason if auto == "cuda" else None,
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


def cuda_info(gpu: bool = False) -> dict[str, Any]:
    """Where the code of the CUDA kernels would come from, as far as that can be told without compiling.

    Parameters
    ----------
    gpu : bool
        Whether the backend works here: the driver is asked then whether it takes the wheel's fat binary.
    """
    from .cuda import binary, cache
    from .cuda.build import COMPILERS, TARGETS, BuildError, find_compiler, kernels_in, source_dir

    macros, compilers, code, kernels = binary.asked_macros(), {}, {}, []
    try:
        sources, names = str(source_dir()), binary.source_names()
    except BuildError as error:
        return {"sources": None, "reason": str(error)}
    if gpu and not macros:
        binary.refused.update(_refused_by_driver())
    for name in COMPILERS:
        try:
            found = find_compiler(name)
            compilers[name] = {"version": found.version, "place": found.place, "reason": None}
        except BuildError as error:
            compilers[name] = {"version": None, "place": None, "reason": str(error)}
    try:
        place, reason = binary.shipped_binary().place, binary.refused.get(binary.SHIPPED)
        shipped: dict[str, Any] = {"binary": place, "reason": reason}
    except BuildError as error:
        shipped = {"binary": None, "reason": str(error)}
    for name in names:
        try:
            code[name] = binary.expected(name, macros)
        except BuildError as error:
            code[name] = f"none: {error}"
        kernels += [
            {"name": kernel, "source": name, "shared_bytes": shape.shared_bytes, "blocks_per_sm": shape.blocks}
            for kernel, shape in kernels_in(name).items()
        ]
    folder = cache.cache_dir()
    return {
        "sources": sources,
        "targets": list(TARGETS),
        "macros": list(macros),
        "shipped": shipped,
        "compilers": compilers,
        "cache_dir": None if folder is None else str(folder),
        "code": code,
        "kernels": kernels,
    }


def _refused_by_driver() -> dict[str, str]:
    from .cuda.binary import SHIPPED, shipped_binary
    from .cuda.build import BuildError
    from .cuda.launch import module_on
    from .driver import DriverError

    try:
        module_on(shipped_binary(), 0)
    except DriverError as error:
        return {SHIPPED: str(error)}
    except BuildError:  # there is none
        return {}
    return {}


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
    found["cuda"] = cuda_info(gpu=found["backends"]["cuda"]["cuda"] is None)
    described = chip if arch is None else arch
    found["kernels_for"] = {
        "arch": described,
        "sms": sms,
        "here": found["gpu"] is not None and described == chip,
    }
    # of another chip than this one it is taken for granted
    works = described != chip or found["gpu"] is None or found["backends"]["cuda"]["cuda"] is None
    found["geometries"] = [
        geometry_info(parse_geometry(text), q_len, dtype, described, sms, cuda_works=works) for text in geometries
    ]
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
    lines += _render_cuda(found["cuda"])
    chip = found["kernels_for"]
    where = "this GPU" if chip["here"] else "not here"
    where = f"sm_{chip['arch']} with {chip['sms']} multiprocessors ({where})"
    lines.append(f"what auto takes, and triton kernels, on {where}:")
    for one in found["geometries"]:
        tile = ", ".join(f"{key} {value}" for key, value in one["tile"].items())
        lines += [
            f"  {one['geometry']} {one['dtype']}, q_len {one['q_len']}: {one['packed_rows']} packed rows in "
            f"{one['row_tiles']} row tile(s) a KV head",
            f"    auto:  {one['auto']}" + (f" ({one['auto_reason']})" if one["auto_reason"] else ""),
            f"    tile:  {tile}",
            f"    why:   {one['reason']}",
            f"    split: one request of {one['example_prefix']} tokens: {one['kv_tiles']} KV tiles, about "
            f"{one['tiles_per_program']} to each of {one['programs']} programs, so {one['splits']} split(s)",
            f"    merge: {one['merge']}",
        ]
    return "\n".join(lines)


def _render_cuda(cuda: dict[str, Any]) -> list[str]:
    if cuda["sources"] is None:
        return [f"cuda kernels: none, {cuda['reason']}"]
    shipped = cuda["shipped"]
    words = f"no: {shipped['reason']}" if shipped["binary"] is None else shipped["binary"]
    if shipped["binary"] is not None and shipped["reason"] is not None:
        words += f", which the driver refused: {shipped['reason']}"
    lines = [f"cuda kernels, for {', '.join(cuda['targets'])}, of {cuda['sources']}:", f"  fat binary {words}"]
    for name, found in cuda["compilers"].items():
        known = f"{found['version']}, {found['place']}" if found["reason"] is None else f"no: {found['reason']}"
        lines.append(f"  {name:10} {known}")
    lines.append(f"  cache      {cuda['cache_dir'] or 'none: this user has no home'}")
    if cuda["macros"]:
        lines.append(f"  macros     {' '.join(cuda['macros'])} (TREEATTN_CUDA_MACROS)")
    for source, code in cuda["code"].items():
        lines.append(f"  {source}: {code}")
        lines += [
            f"    {kernel['name']}: {kernel['shared_bytes']} bytes shared, {kernel['blocks_per_sm']} block(s) an SM"
            for kernel in cuda["kernels"]
            if kernel["source"] == source
        ]
    return lines
