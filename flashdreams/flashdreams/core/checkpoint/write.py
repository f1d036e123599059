"""Writing safetensors files tensor by tensor: no more than one of them is in memory.

The bytes are those that ``safetensors.torch.save_file`` writes for the same tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.header import BITS
from flashdreams.core.checkpoint.mapped import DTYPE_NAMES

# The format's own order of its number formats, the first last; tensors are laid out from the last one down.
_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what stands in the header, and where its values come from."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * BITS[DTYPE_NAMES[self.dtype]] // 8


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``500 MB`` or ``1000000`` (units of 1000).

    Raises:
        ValueError: it is no positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(f"size is {text!r}; expected a number of bytes, such as 5GB or 500MB")
    return size


def write_checkpoint(
    path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None, shard_size: int | None = None
) -> list[Path]:
    """Write ``path``, or if the tensors take more than ``shard_size`` bytes, numbered shards and their index beside it.

    Files appear under their names when all are complete.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: the disk is too full, or cannot be written.
    """
    ordered = sorted(entries, key=lambda entry: (-_ORDER.index(DTYPE_NAMES[entry.dtype]), entry.key))
    shards = _shards(ordered, shard_size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        need, free = sum(entry.bytes for entry in ordered), shutil.disk_usage(path.parent).free
        if need > free:
            raise CheckpointError(
                f"{path} takes {need / 1e9:.1f} GB, but {path.parent} has {free / 1e9:.1f} GB free; give another folder"
            )
        return _write_all(path, shards, metadata or {})
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None


def _shards(entries: list[Entry], limit: int | None) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if limit is not None and shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write_all(path: Path, shards: list[list[Entry]], metadata: Mapping[str, str]) -> list[Path]:
    count = len(shards)
    names = [path] if count == 1 else [
        path.with_name(f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}") for number in range(1, count + 1)
    ]  # fmt: skip
    partial = [name.with_name(f".{name.name}.{os.getpid()}.part") for name in names]
    try:
        for file, shard in zip(partial, shards, strict=True):
            _write(file, shard, metadata)
        for file, name in zip(partial, names, strict=True):
            os.replace(file, name)
    finally:
        for file in partial:
            file.unlink(missing_ok=True)
    if count == 1:
        return names
    table = {entry.key: name.name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.bytes for shard in shards for entry in shard)
    index = path.with_name(path.name + ".index.json")
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
    index.write_text(json.dumps(content, indent=2) + "\n")
    return [*names, index]


def _write(path: Path, entries: list[Entry], metadata: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for entry in entries:
        span = [place, place + entry.bytes]
        header[entry.key] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        place = span[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = entry.make()
            if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
                raise RuntimeError(f"{entry.key} came out as {value.dtype} {list(value.shape)}, not as was planned")
            if value.numel():
                file.write(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
