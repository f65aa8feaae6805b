"""Triton kernels: the layout, the plan, attention with its merge, and verify. Importing this package imports Triton."""
