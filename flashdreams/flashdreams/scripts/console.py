"""How the command line speaks: one message for a mistake, exit codes, two-column text. No torch here."""

from __future__ import annotations

import argparse
import io
import os
import select
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from flashdreams.config import ConfigError
from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import PluginWarning


class Parser(argparse.ArgumentParser):
    """A parser of flags whose errors are those of the house."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` says what it takes")


MISTAKE, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
"""Exit codes: a person's mistake; Ctrl-C (128 + SIGINT); the reader of our output left (128 + SIGPIPE)."""


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a person's mistake is one message on stderr, without traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PluginWarning)
        show_other = warnings.showwarning

        def show(message: Any, category: Any, *rest: Any, **named: Any) -> None:
            if issubclass(category, PluginWarning):
                warn(str(message))
            else:
                show_other(message, category, *rest, **named)

        warnings.showwarning = show  # ty: ignore[invalid-assignment]
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Unicode is no reason to fail
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = command()
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except (UserError, ConfigError) as error:
            print(f"error: {error}", file=sys.stderr)
            return MISTAKE
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            if not _reader_left():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at exit
            return PIPE_CLOSED


def write_file(text: str) -> None:
    """``text`` on stdout as the contents of a file: UTF-8, whatever the terminal speaks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    sys.stdout.write(text)


def warn(message: str) -> None:
    """One line on stderr for what does not stop the command."""
    print(f"warning: {message}", file=sys.stderr)


def columns(rows: Iterable[tuple[str, str]], *, limit: int = 30, wrap: bool = True) -> str:
    """Rows of a term and its text in two columns, as wide as the terminal; a term beyond ``limit`` has its own line.

    Text that does not fit a line is wrapped, or cut short where ``wrap`` is false.
    """
    rows = list(rows)
    left = min(limit, max((len(term) for term, _ in rows), default=0)) + 2
    width = max(24, min(shutil.get_terminal_size().columns, 110) - 2 - left)
    lines = []
    for term, text in rows:
        if wrap:
            first, *more = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        else:
            first, more = textwrap.shorten(text, width, placeholder=" ...", break_on_hyphens=False), []
        if len(term) > left - 2:
            lines.append(f"  {term}")
            term = ""
        lines.append(f"  {term:{left}}{first}".rstrip())
        lines += [" " * (2 + left) + line for line in more]
    return "\n".join(lines)


def _reader_left() -> bool:
    """Whether stdout is a pipe that nobody reads any more (and not some other pipe of the program's)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll on this system, no stdout, or one that is no file
        return False
