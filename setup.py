"""Build script; all metadata is in pyproject.toml. Compiled kernels, where a toolkit is found, will be hooked in here."""

from setuptools import setup

setup()
