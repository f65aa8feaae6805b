"""Stands in for torchvision: any name is an empty class, so that `from torchvision... import name` works."""


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
