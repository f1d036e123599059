"""What a file is, by its first bytes and never by its name."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Literal

from flashdreams.core.checkpoint.errors import CheckpointError

Kind = Literal["safetensors", "zip", "pickle", "index"]

ENOUGH = 1024
"""Bytes that tell."""

_FOREIGN = {
    b"GGUF": "a GGUF file (block-quantized), which is not supported; use the safetensors file of the same model",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, which is not supported; use the safetensors file of the same model",
    b"\x93NUMPY": "a NumPy array; save the weights with safetensors",
    b"\x1f\x8b": "a gzip archive; unpack it and give the file inside",
    b"7z\xbc\xaf": "a 7z archive; unpack it and give the file inside",
}
_POINTER = re.compile(rb"version https://git-lfs[^\n]*\n(?:.*\n)*?size (\d+)")
_PAGE = re.compile(rb"\s*<(?:!doctype|html|\?xml|head|body)", re.IGNORECASE)


def kind_of(path: Path) -> Kind:
    """How to read the file at ``path``.

    Raises:
        CheckpointError: there is none, or see :func:`kind_of_bytes`.
    """
    size = file_size(path)
    try:
        with path.open("rb") as file:
            return kind_of_bytes(file.read(ENOUGH), size, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def kind_of_bytes(first: bytes, size: int, path: str) -> Kind:
    """How to read a file that begins with ``first``: safetensors, a ``torch.save`` zip, a bare pickle, or the JSON
    index of shards.

    Raises:
        CheckpointError: it is something else; the message says what, and how to get the weights.
    """
    if pointer := _POINTER.match(first):
        raise CheckpointError(
            f"{path} is a Git LFS pointer of {size} bytes, not the weights, which have {int(pointer[1])} bytes; "
            "run `git lfs pull` in its repository, or download the file itself"
        )
    for magic, what in _FOREIGN.items():
        if first.startswith(magic):
            raise CheckpointError(f"{path} ({size} bytes) is {what}")
    if _PAGE.match(first):
        raise CheckpointError(
            f"{path} ({size} bytes) is a web page, not weights: {_text(first)}; the download was answered with a "
            "log-in or error page: log in, and take the file's download link"
        )
    if first[8:9] == b"{" and b"\0" in first[:8]:  # before pickle, which a header of 128 bytes would look like
        return "safetensors"
    if first.startswith(b"PK\x03\x04"):
        return "zip"
    if first[:1] == b"\x80" and first[1:2] <= b"\x05":
        return "pickle"
    if first.lstrip().startswith(b"{") and b"\0" not in first:
        return "index"
    if not first:
        what = "it is empty"
    elif not first.strip(b"\0"):
        what = "it begins with zeros only, as a download that was interrupted does"
    else:
        what = f"it begins with {first[:16]!r}"
    raise CheckpointError(f"{path} ({size} bytes) is not a whole safetensors file or pickle: {what}; download it again")


def file_size(path: Path) -> int:
    """Size of a regular file.

    Raises:
        CheckpointError: there is none at ``path``, or it is a folder, a pipe, a device or a link in a circle.
    """
    try:
        found = path.stat()
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link that leads nowhere: {error.strerror}") from None
        raise CheckpointError(f"no checkpoint at {path}; give the path of a .safetensors file, or org/repo") from None
    except ValueError:
        raise CheckpointError(f"no checkpoint at {str(path)[:200]!r}, which is no path") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise CheckpointError(f"{path} is {what}; give the path of a file of weights")
    return found.st_size


def _text(first: bytes) -> str:
    return repr(" ".join(re.sub(r"<[^>]*>", " ", first[:400].decode(errors="replace")).split())[:80])
