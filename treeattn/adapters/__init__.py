"""Bridges to frameworks: each owns what a version of its framework can change; treeattn imports none."""
