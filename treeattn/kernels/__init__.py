"""Triton kernels, one purpose per module; nothing here is imported before a kernel is needed."""
