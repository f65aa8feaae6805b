"""The CUDA C++ kernels of ``csrc``: building them, loading them, launching them. Importing this imports no toolkit."""
