"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The file cannot be read, or does not fit the module. The message says how, and what to do."""
