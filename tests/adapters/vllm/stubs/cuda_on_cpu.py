"""What vLLM asks of CUDA where there is none.

vLLM's own CPU worker replaces streams, events and pinned memory with placeholders; its Triton kernel that writes K and
V asks for a compute capability besides, and for a chip with FP8.
"""

import torch
import vllm.v1.attention.ops.triton_reshape_and_cache_flash as writing
import vllm.v1.worker.cpu.shm  # noqa: F401

torch.cuda.get_device_capability = lambda *_: (9, 0)
writing._is_supported_kv_cache_dtype = lambda _: True
