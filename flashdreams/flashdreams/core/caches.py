"""Folders for what can be made again: digests, downloads, compiled code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from flashdreams.core.notices import say_once

VARIABLE = "FLASHDREAMS_CACHE"


def cache_folder(name: str) -> Path:
    """The folder ``name`` of our caches, made if need be: under ``FLASHDREAMS_CACHE``, else under the user's cache.

    Where neither can be written (no home, no name for the user id, a read-only file system), a private folder under the
    system's temporary one is taken, and said once.
    """
    default = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = os.environ.get(VARIABLE) or os.path.join(default, "flashdreams")
    return _made(writable(Path(wanted), VARIABLE) / name)


def writable(folder: Path, variable: str) -> Path:
    """``folder``, or if it cannot be written a temporary stand-in, said once with the variable that moves it."""
    if is_writable(folder):
        return folder
    stand_in = _private() / folder.name
    say_once(f"the cache folder {folder} cannot be written; using {stand_in} (set {variable} to choose another)")
    return _made(stand_in)


def is_writable(folder: Path) -> bool:
    """Whether files can be made in ``folder``, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, ValueError):
        return False


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _private() -> Path:
    """A folder under the system's temporary one that no other user can have laid out for us."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"flashdreams-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink()):
            raise OSError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="flashdreams-"))
    return folder
