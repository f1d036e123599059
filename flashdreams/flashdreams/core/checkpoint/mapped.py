"""Tensors straight from the pages of a file, and those pages given back once a tensor was copied elsewhere."""

from __future__ import annotations

import errno
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.header import TensorInfo

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_POPULATE_READ = 22  # Linux 5.14; the mmap module has no name for it yet


class MappedFile:
    """A file in the address space: pages are read when touched, and private once written, so the file never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if sys.platform == "win32":
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            else:
                # Without the reservation a file larger than the memory could not be streamed to another device.
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )

    def tensor(self, info: TensorInfo) -> Tensor:
        """The stored tensor, in place; each has a storage of its own that keeps the mapping alive.

        Raises:
            CheckpointError: the file is shorter than when its header was read.
        """
        if info.stop > len(self._map):
            raise CheckpointError(f"{self.path} was cut off at byte {len(self._map)} while it was read; fetch it again")
        dtype = TORCH_DTYPES[info.dtype]
        if info.start == info.stop:
            return torch.empty(info.shape, dtype=dtype)
        count = (info.stop - info.start) // dtype.itemsize
        if info.start % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.stop - info.start, offset=info.start)
            flat = raw.clone().view(dtype)
        else:
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=info.start)
        return flat.view(info.shape) if info.stride is None else flat.as_strided(info.shape, info.stride)

    def populate(self, info: TensorInfo) -> None:
        """Bring the tensor's pages in with one call, so that a failing disk is an error here and not a crash later.

        Raises:
            CheckpointError: the pages cannot be read.
        """
        start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform != "linux" or start >= info.stop:
            return
        try:
            self._map.madvise(_POPULATE_READ, start, info.stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel does without
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {info.start} ({error.strerror}): it was cut off after it was "
                    "opened, or the disk fails"
                ) from None

    def release(self, info: TensorInfo) -> None:
        """Forget the pages that belong to this tensor alone; touched again, they are read again."""
        start = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = info.stop // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
