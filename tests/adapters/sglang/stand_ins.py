"""Stand-ins for what SGLang imports beside torch and Triton, where only SGLang is packed (benchmarks/sglang_pack.py).

A name is stood in for only where nothing of it is installed. Any submodule exists and holds any name, which is a class:
it may be inherited from, indexed, or used as a decorator. Of :data:`KERNELS`, which would compute, nothing can be
called, so that no output can be right or wrong by a stand-in; `is_arch_support_pdl` alone answers, with False.
"""

import importlib.abc
import importlib.machinery
import re
import sys
from types import ModuleType

KERNELS = ("sgl_kernel", "tvm_ffi", "flashinfer")
SERVERS = (
    "IPython", "PIL", "aiohttp", "compressed_tensors", "fastapi", "gguf", "httpx", "huggingface_hub", "openai",
    "opentelemetry", "orjson", "psutil", "pybase64", "pydantic", "pydantic_core", "requests", "safetensors",
    "sentencepiece", "starlette", "tokenizers", "torchvision", "transformers", "uvicorn", "xgrammar", "yaml", "zmq",
)  # fmt: skip
"""Packages of the server, its models' configurations and tokenizers: no attention."""


class _Anything(type):
    """Class of the stand-ins: what is asked of one as of a container or a module is answered too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name, cls)

    def __getitem__(cls, key):
        return cls

    def __setitem__(cls, key, value):
        pass

    def __contains__(cls, key):
        return False

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Server(metaclass=_Anything):
    """Something of a server's package: does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name, Server)

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else Server()


class Kernel(metaclass=_Anything):
    """Something of a package of kernels: cannot be called."""

    def __new__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} is a stand-in: its package is not installed")


def _named(name, kind):
    return type(kind)(name, (Kernel if issubclass(kind, Kernel) else Server,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in (*KERNELS, *SERVERS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        kind = Kernel if module.__name__.partition(".")[0] in KERNELS else Server

        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return (lambda *args, **kwargs: False) if name == "is_arch_support_pdl" else _named(name, kind)

        module.__path__, module.__getattr__ = [], attribute


def install():
    """Let what is not installed be imported, from now on; `regex` is Python's own `re`."""
    try:
        import regex  # noqa: F401
    except ImportError:
        sys.modules["regex"] = re
    sys.meta_path.append(_Finder())
