"""Attention kernels for tree verify in speculative decoding."""
