"""The version of the runtime and of every in-tree integration."""

__version__ = "0.1.0"
