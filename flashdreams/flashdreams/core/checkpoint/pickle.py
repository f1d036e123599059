"""Files of ``torch.save``, read under weights-only rules: what would run code is refused by name, and nothing runs."""

from __future__ import annotations

import pickletools
import re
import sys
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashdreams.core.checkpoint.content import Kind, kind_of
from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.header import TensorInfo
from flashdreams.core.checkpoint.mapped import DTYPE_NAMES
from flashdreams.core.checkpoint.nesting import select

_RUNS_CODE = {
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "builtins",
    "__builtin__",
    "runpy",
    "shutil",
    "socket",
    "pty",
    "commands",
}


@dataclass
class PickledTensors:
    """The tensors of one state dict: where they lie in the file or, for the old format, themselves (``loaded``)."""

    tensors: dict[str, TensorInfo]
    loaded: dict[str, Tensor] | None = None
    notices: list[str] = field(default_factory=list)


def read_pickle(path: Path, kind: Kind, entry: str | None = None) -> PickledTensors:
    """The state dict of ``path``: the one ``entry`` names (``a/b`` for nested ones), else the one to run with.

    Tensors that are not part of it (optimizer state, a second copy of the weights) are never read.

    Raises:
        CheckpointError: the file is cut off or damaged, holds objects other than tensors, numbers, texts and
            containers, or has no such state dict.
    """
    records = _records(path) if kind == "zip" else None
    in_place = records is not None
    state, notices = select(_load(path, "meta" if in_place else "cpu"), path, entry)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    rest = sorted(set(state) - set(tensors))
    if rest:
        notices.append(f"{path.name}: {len(rest)} entries are no tensors and are left out: {', '.join(rest[:5])}")
    if in_place:
        try:
            return PickledTensors({key: _locate(key, value, records) for key, value in tensors.items()}, None, notices)
        except LookupError:  # stored in a way that cannot be mapped: read whole, as torch does
            state, _ = select(_load(path, "cpu"), path, entry)
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    loaded = {key: value.detach() for key, value in tensors.items()}
    infos = {
        key: TensorInfo(_dtype(path, key, value), tuple(value.shape), 0, value.nbytes) for key, value in loaded.items()
    }
    return PickledTensors(infos, loaded, notices)


def read_object(path: Path) -> Any:
    """Whatever a small file of ``torch.save`` holds, on the CPU.

    Raises:
        CheckpointError: as for :func:`read_pickle`.
    """
    return _load(path, "cpu")


def _records(path: Path) -> dict[int, int] | None:
    """Sizes of the zip's records by where their bytes begin; ``None`` if they cannot be used in place.

    Raises:
        CheckpointError: the zip is cut off, or is not one of ``torch.save``.
    """
    size = path.stat().st_size
    records = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if "data.pkl" not in names:
                raise CheckpointError(
                    f"{path} ({size} bytes) is a zip archive, but not one of torch.save: unpack it and give the file "
                    "of weights inside"
                )
            if "constants.pkl" in names:
                raise CheckpointError(f"{path} is a TorchScript program, not weights; save its state_dict() instead")
            order = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED:
                    return None
                file.seek(member.header_offset + 26)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
                records[member.header_offset + 30 + name + extra] = member.file_size
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} ({size} bytes) is not a whole PyTorch file ({error}); it was cut off or damaged: download it again"
        ) from None
    if any(start + length > size for start, length in records.items()):
        raise CheckpointError(f"{path} ({size} bytes) is cut off: it lists tensors beyond its end; download it again")
    return records if order.decode(errors="replace") == sys.byteorder else None


def _load(path: Path, device: str) -> Any:
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # damaged pickles end in exceptions of every kind
        _refuse(path, error)


def _refuse(path: Path, error: Exception) -> NoReturn:
    named = sorted(set(_forbidden(path, str(error))))
    if not named:
        text = " ".join(str(error).rpartition("error:")[2].partition("Check the doc")[0].split())[:160]
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole file of weights ({type(error).__name__}: {text}); "
            "it was cut off or damaged, or holds more than weights: download it again, or take a safetensors file"
        ) from None
    listed = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
    head = f"{path} holds {listed}, which only running code from the file could make; nothing was run. "
    if any("." not in name or name.partition(".")[0] in _RUNS_CODE for name in named):
        raise CheckpointError(head + "A file of weights has no use for that: do not trust it") from None
    if not all(name.startswith("numpy.") or name.rpartition(".")[2][:1].isupper() for name in named):
        raise CheckpointError(head + "Take a safetensors file, or ask its author for the weights alone") from None
    modules = ", ".join(sorted({name.rpartition(".")[0] for name in named}))
    raise CheckpointError(
        head + "If you trust its author and have these classes, keep the weights alone: "
        f'python -c "import torch, {modules}; '
        f"torch.serialization.add_safe_globals([{', '.join(named)}]); "
        f"state = torch.load('{path.name}', map_location='cpu', weights_only=True); "
        "torch.save({k: v for k, v in state.items() if isinstance(v, dict)}, 'weights.pt')\""
    ) from None


def _forbidden(path: Path, message: str) -> list[str]:
    """Names of what the file would import beyond the allowed, found without importing any of it."""
    found = re.findall(r"(?:Unsupported global: GLOBAL|unsupported GLOBAL) (\S+)", message)
    try:
        if kind_of(path) == "zip":
            return found and found + torch.serialization.get_unsafe_globals_in_checkpoint(path)
        return found or _imports(path)
    except Exception:  # a damaged file; the message has named the first
        return found


def _imports(path: Path) -> list[str]:
    """What a pickle that was not written by torch would import first."""
    texts: list[str] = []
    with path.open("rb") as file:
        for operation, argument, _ in pickletools.genops(file):
            if operation.name == "GLOBAL":
                return [str(argument).replace(" ", ".")]
            if operation.name == "STACK_GLOBAL":
                return [".".join(texts[-2:])]
            if isinstance(argument, str):
                texts.append(argument)
    return []


def _locate(key: str, value: Tensor, records: dict[int, int] | None) -> TensorInfo:
    """Where a tensor that was loaded on meta lies in the file.

    Raises:
        LookupError: its storage is none of the file's records.
    """
    storage = value.untyped_storage()
    offset = getattr(storage, "_checkpoint_offset", None)
    if offset is None or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        raise LookupError(key)
    if (records or {})[offset] != storage.nbytes() or not value.numel():
        raise LookupError(key)
    last = sum((length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True))
    start = offset + value.storage_offset() * value.itemsize
    stop = start + (last + 1) * value.itemsize
    if stop > offset + storage.nbytes():
        raise LookupError(key)
    stride = None if value.is_contiguous() else value.stride()
    return TensorInfo(DTYPE_NAMES[value.dtype], tuple(value.shape), start, stop, stride)


def _dtype(path: Path, key: str, value: Tensor) -> str:
    if value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path}: {key} is stored as {value.dtype} ({value.layout}), which is not supported")
    return DTYPE_NAMES[value.dtype]
