"""Errors that are a person's to mend: printed as one message, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """A bad flag, file, size or value. The message names it, what was expected, and what to do."""
