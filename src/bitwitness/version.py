"""The version; the package's metadata is made of it."""

__version__ = "0.1.0"
