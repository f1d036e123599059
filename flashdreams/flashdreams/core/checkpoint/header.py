"""The header of a safetensors file, checked in full before a byte of its data is believed.

Layout of a file: 8 bytes, little-endian length ``n``; ``n`` bytes of JSON; the tensors, back to back, to the end.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from flashdreams.core.checkpoint.errors import CheckpointError

MAX_HEADER = 25_000_000
"""Bytes. Headers of real checkpoints stay under one million; a larger claim is damage or an attack on memory."""

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Width of an element, by the format's own names of number formats."""

_MOST = 2**63


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: number format, shape, and where its bytes ``start`` and ``stop`` in the file.

    ``stride`` (elements) is ``None`` for the usual row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Header:
    """Every tensor by key, in the order of the data, and the file's free-form notes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)


def read_file_header(path: Path) -> Header:
    """The header of a local file.

    Raises:
        CheckpointError: the file is cut off, damaged, or not safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_length(file.read(8), size, str(path))
        return parse_header(file.read(length), size, str(path))


def header_length(first: bytes, size: int, name: str) -> int:
    """Length of the JSON that follows the ``first`` 8 bytes of a file of ``size`` bytes."""
    if len(first) < 8:
        _refuse(name, size, "it ends before its header")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        _refuse(name, size, f"its header claims {length} bytes; at most {MAX_HEADER} are believed")
    if length > size - 8:
        _refuse(name, size, f"its header has {length} bytes, so the file is cut off inside it")
    return length


def parse_header(data: bytes, size: int, name: str) -> Header:
    """The header of a file of ``size`` bytes from its JSON, every entry and every offset checked.

    Raises:
        CheckpointError: with the first thing that is wrong, and the key it is wrong about.
    """
    if not data.startswith(b"{"):
        _refuse(name, size, "its header is not JSON")
    try:
        fields = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if not isinstance(fields, dict):
            raise ValueError("its header is not one JSON object")
        metadata = _metadata(fields.pop("__metadata__", {}))
        begin = 8 + len(data)
        tensors = {key: _entry(key, value, begin) for key, value in fields.items()}
        ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
        _check_cover(ordered, begin, size)
    except (ValueError, RecursionError) as error:
        _refuse(name, size, f"{error}" if type(error) is ValueError else f"its header is damaged: {_brief(error)}")
    return Header(dict(ordered), metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"its header has the key {_show(twice)} twice")
    for key in result:
        key.encode()  # a lone surrogate is no text and would fail later, in a message
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"its header has the number {text}")


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its __metadata__ is not a table of texts")
    return value


def _entry(key: str, value: Any, begin: int) -> TensorInfo:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{_show(key)} lacks dtype, shape or data_offsets, or has more than these")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{_show(key)} has the unknown number format {_show(dtype)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{_show(key)} has shape {_show(shape)} and offsets {_show(offsets)}, which are no sizes")
    bits = BITS[dtype]
    for length in shape:
        bits *= length
        if bits >= 8 * _MOST:
            raise ValueError(f"{_show(key)} has shape {_show(shape)}, larger than any memory")
    start, stop = offsets
    if 8 * (stop - start) != bits:
        raise ValueError(
            f"{_show(key)} {dtype} {_show(shape)} takes {bits / 8:g} bytes, but its offsets hold {stop - start}"
        )
    return TensorInfo(dtype, tuple(shape), begin + start, begin + stop)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) < 64 and all(type(n) is int and 0 <= n < _MOST for n in value)


def _check_cover(ordered: list[tuple[str, TensorInfo]], begin: int, size: int) -> None:
    """The tensors lie back to back from the end of the header to the end of the file."""
    end, before = begin, "the header"
    for key, info in ordered:
        if info.start != end:
            how = "overlaps" if info.start < end else f"leaves {info.start - end} unused bytes after"
            raise ValueError(f"{_show(key)} {how} {before}")
        end, before = info.stop, _show(key)
    if end > size:
        raise ValueError(f"it is cut off: {end} bytes expected, the last {end - size} are missing")
    if end < size:
        raise ValueError(f"it has {size - end} bytes after its last tensor")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _brief(error: Exception) -> str:
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)[:120]


def _refuse(name: str, size: int, problem: str) -> NoReturn:
    raise CheckpointError(
        f"{name} ({size} bytes) is not a whole safetensors file: {problem}; "
        "download it again, or write it anew with safetensors"
    ) from None
