"""For a step whose backend is not named: whether all kernels are there that its calls may take, or can be made now.

So that neither a call nor a capture waits for a compiler.
"""

from __future__ import annotations

import warnings

import torch

from ..capabilities import Asked, missing
from ..config import KernelConfig
from ..geometry import Geometry
from .binary import asked_macros
from .build import BuildError
from .config import merge_of, variant_of
from .launch import NotLoadedError, index_of, load

failed: dict[tuple[int, tuple[str, ...]], str] = {}
"""Why that failed, by device and macros. It is not tried again."""


def load_every(geometry: Geometry, config: KernelConfig, device: torch.device) -> bool:
    """Load every kernel that calls with a geometry may take, and tell whether that worked.

    A capture loads none. What fails elsewhere is a RuntimeWarning, once for a device.
    """
    index, macros = index_of(device), asked_macros()
    if (index, macros) in failed:
        return False
    try:
        caps = (False, True) if missing("cuda", "cuda", Asked(geometry, logits_soft_cap=1.0)) is None else (False,)
        variants = [variant_of(geometry, config, capped, fresh) for capped in caps for fresh in (False, True)]
        merge = merge_of(geometry)
        for variant in dict.fromkeys(variants if merge is None else [*variants, merge]):
            load(variant, index, macros)
    except NotLoadedError:
        return False
    except BuildError as error:
        failed[index, macros] = str(error)
        warnings.warn(f"backend 'auto' takes Triton's kernels on device {index}: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True
