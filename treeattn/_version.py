"""The one place that holds the version; setuptools reads it when a wheel is built."""

__version__ = "0.1.0"
