"""What the layers of one group share: heads, head dims, dtypes, window, and which part of the keys they see."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .kv import KVLayout

Part = Literal["all", "prefix", "tree"]
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """Geometry of a group of layers; checked when made.

    Attributes
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of a layer, per GPU. The first is a multiple of the second.
    head_dim, head_dim_v : int
        Of q and K, and of V and out.
    dtype : torch.dtype
        Of q, fresh K and V, and out.
    kv_dtype : torch.dtype
        Of the caches: `dtype`, float8_e4m3fn or float8_e5m2.
    kv_layout : {"NHD", "HND"}
        Axis order of 4-D caches.
    fresh_tree : bool
        The nodes' K and V come with each call.
    shared_kv : bool
        V is the first `head_dim_v` numbers of K (MLA in its absorbed form).
    window_left : int
        A row sees keys at positions ``>= its own - window_left``; negative for no window.
    part : {"all", "prefix", "tree"}
        Which keys count.
    batch_invariant : bool
        A row's bits do not depend on the batch around it.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_layout: KVLayout = "NHD"
    fresh_tree: bool = False
    shared_kv: bool = False
    window_left: int = -1
    part: Part = "all"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if not isinstance(getattr(self, name), numbers.Integral):
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
        for name in ("dtype", "kv_dtype"):
            if not isinstance(getattr(self, name), torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {getattr(self, name)!r}")
        heads, kv_heads = self.num_qo_heads, self.num_kv_heads
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise ValueError(f"num_qo_heads {heads} must be a multiple of num_kv_heads {kv_heads}, and both positive")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.shared_kv and self.head_dim_v > self.head_dim:
            sizes = f"head_dim_v {self.head_dim_v} exceeds head_dim {self.head_dim}"
            raise ValueError(f"V is a part of K with shared_kv: {sizes}")
        if not isinstance(self.window_left, int):
            raise TypeError(f"window_left must be an int, negative for no window, got {self.window_left!r}")
        if not self.dtype.is_floating_point or self.dtype in FP8_DTYPES:
            raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {self.dtype}")
        if self.kv_dtype != self.dtype and self.kv_dtype not in FP8_DTYPES:
            raise TypeError(f"kv_dtype must be dtype {self.dtype}, float8_e4m3fn or float8_e5m2, got {self.kv_dtype}")
        if self.kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout must be 'NHD' or 'HND', got {self.kv_layout!r}")
        if self.part not in ("all", "prefix", "tree"):
            raise ValueError(f"part must be 'all', 'prefix' or 'tree', got {self.part!r}")

    @classmethod
    def of(
        cls,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        **more: Any,
    ) -> Geometry:
        """Geometry with the defaults of :func:`treeattn.plan`: K and V alike, and caches of `dtype`."""
        return cls(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v, dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype, **more,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads
