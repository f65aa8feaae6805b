"""Stands in for sglang-kernel on a GPU: SGLang's Triton attention imports names of it, and calls only one of them.

Any submodule exists and holds any name; what is called raises, but for what `utils` says of the chip.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _Missing:
    """Something of the real package: it has any attribute, and cannot be called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return _attribute(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a stand-in: the real sglang-kernel is not installed")


class _AnyModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        module.__getattr__ = lambda name: _attribute(f"{module.__name__}.{name}")


def _attribute(name):
    last = name.rsplit(".", 1)[-1]
    if last.startswith("__"):
        raise AttributeError(name)
    return (lambda *args, **kwargs: False) if last == "is_arch_support_pdl" else _Missing(name)


def __getattr__(name):
    return _attribute(f"{__name__}.{name}")


sys.meta_path.append(_AnyModule())
