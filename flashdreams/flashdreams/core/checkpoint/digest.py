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
    found = path.stat()
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return key, [found.st_size, found.st_mtime_ns, found.st_ino]
