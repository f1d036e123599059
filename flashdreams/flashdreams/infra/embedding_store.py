"""Embeddings of prompts on disk, from run to run. Losing any of it costs time and nothing else."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from flashdreams.core.caches import cache_folder
from flashdreams.core.notices import say_once
from flashdreams.infra.embeds import Embedding

LIMIT = 2 << 30
"""Bytes of all files; those that were used longest ago go first."""


def read_embedding(key: str) -> Embedding | None:
    """What :func:`write_embedding` kept under ``key``; ``None`` if there is nothing, or nothing whole."""
    try:
        path = _place(key)
        with safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            found = Embedding(file.get_tensor("rows").clone(), int(notes["length"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if notes.get("sum") != _checksum(key, found):
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def write_embedding(key: str, embedding: Embedding) -> None:
    """Keep ``embedding`` under ``key``, in one step; where that cannot be done, it is said and left."""
    embedding = Embedding(embedding.rows.cpu(), embedding.length)
    notes = {"length": str(embedding.length), "sum": _checksum(key, embedding)}
    partial = None
    try:
        path = _place(key)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            partial = Path(file.name)
            file.write(save({"rows": embedding.rows}, notes))
        os.replace(partial, path)
        _bound(path.parent)
    except OSError as error:
        say_once(f"embeddings of prompts cannot be kept ({error}); prompts are encoded anew in each run")
        with suppress(OSError):
            if partial is not None:
                partial.unlink(missing_ok=True)


def _place(key: str) -> Path:
    return cache_folder("embeddings") / f"{key}.safetensors"


def _checksum(key: str, embedding: Embedding) -> str:
    """Of all that a reader takes from the file; safetensors has none of its own."""
    rows = embedding.rows
    facts = f"{key} {rows.dtype} {list(rows.shape)} {embedding.length} "
    return hashlib.sha256(facts.encode() + rows.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _bound(folder: Path) -> None:
    files = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process removed it
            found = path.stat()
            files.append((found.st_mtime_ns, found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT:
            break
        with suppress(OSError):
            path.unlink()
        total -= size
