"""Build script: a pure-Python wheel. All metadata is in pyproject.toml."""

from setuptools import setup

setup()
