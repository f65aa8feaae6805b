"""Benchmark of tree attention: named workloads, providers, a correctness gate, cold-L2 times, JSON, tables, plots.

Nothing else imports it; ``treeattn bench`` is its command. Results of ours are in ``benchmarks/results``.
"""
