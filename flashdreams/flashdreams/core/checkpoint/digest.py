"""The sha256 of a file, computed once for as long as the file stays the same."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from flashdreams.core.caches import cache_folder


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of the file's bytes, remembered by its place, size, number and time of change."""
    key, state = _identity(path)
    note = cache_folder("digests") / key
    try:
        known = json.loads(note.read_text())
        if known["state"] == state:
            return "sha256:" + known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = hash_file(path)
    remember(path, digest)
    return "sha256:" + digest


def digest_then(path: Path, state: tuple[int, ...]) -> str:
    """The digest of the file as it was in ``state`` (see :func:`file_state`), or a word on why it cannot be had."""
    try:
        return file_digest(path) if file_state(path) == state else "changed since it was loaded"
    except OSError:
        return "gone since it was loaded"


def file_state(path: Path) -> tuple[int, ...]:
    """Size, time of change and number of a file: what is as before belongs to the same bytes."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def remember(path: Path, sha256: str) -> None:
    """Note that the file, as it is now, has this sha256."""
    key, state = _identity(path)
    note = cache_folder("digests") / key
    partial = note.with_name(f"{key}.{os.getpid()}")
    try:
        partial.write_text(json.dumps({"state": state, "sha256": sha256, "path": str(path)}))
        os.replace(partial, note)
    except OSError:  # a full disk costs the next run a second look at the file, no more
        partial.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """Hex sha256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> tuple[str, list[int]]:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return key, list(file_state(path))
