"""An opened checkpoint: every tensor's name, format, shape and place are known; no weight has been read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flashdreams.core.checkpoint import hub
from flashdreams.core.checkpoint.content import ENOUGH, file_size, kind_of, kind_of_bytes
from flashdreams.core.checkpoint.digest import file_digest
from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.header import TensorInfo, read_file_header
from flashdreams.core.checkpoint.layout import Choice, beside, choose, read_index
from flashdreams.core.checkpoint.mapped import TORCH_DTYPES, MappedFile
from flashdreams.core.checkpoint.pickle import read_pickle
from flashdreams.core.checkpoint.report import joint_digest
from flashdreams.core.checkpoint.sources import HubSource, LocalSource, parse_source


@dataclass
class Part:
    """One file of a checkpoint: its tensors, and where it is. ``loaded`` holds what cannot be mapped (old pickles)."""

    name: str
    tensors: dict[str, TensorInfo]
    path: Path | None = None
    loaded: dict[str, Tensor] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    mapping: MappedFile | None = None


class Checkpoint:
    """The tensors of one or several files, read one at a time."""

    def __init__(self, source: str, parts: list[Part], notices: list[str], listing: hub.Listing | None = None) -> None:
        self.source = source
        self.parts = parts
        self.notices = notices
        self.where: dict[str, Part] = {}
        self._listing = listing
        for part in parts:
            for key in part.tensors:
                if key in self.where:
                    raise CheckpointError(f"{source}: {key} stands in {self.where[key].name} and in {part.name}")
                self.where[key] = part

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by key."""
        return {key: part.tensors[key] for key, part in self.where.items()}

    @property
    def files(self) -> list[Path]:
        """The local files; :meth:`fetch` makes remote ones local."""
        return [part.path for part in self.parts if part.path is not None]

    def meta(self) -> dict[str, Tensor]:
        """Every tensor on the meta device.

        Raises:
            CheckpointError: one has a number format that PyTorch lacks.
        """
        for key, info in self.tensors.items():
            if info.dtype not in TORCH_DTYPES:
                raise CheckpointError(
                    f"{self.source}: {key} is stored as {info.dtype}, which PyTorch cannot compute with"
                )
        return {
            key: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
            for key, info in self.tensors.items()
        }

    def fetch(self) -> None:
        """Download what is remote.

        Raises:
            CheckpointError: see :func:`hub.download`; or a file differs from the header that was read before.
        """
        remote = [part for part in self.parts if part.path is None]
        if not remote or self._listing is None:
            return
        for part, path in zip(remote, hub.download(self._listing, [part.name for part in remote]), strict=True):
            if _open_file(path, None, []).tensors != part.tensors:
                raise CheckpointError(
                    f"{path} has another header than {self.source} on the hub; remove it and run again"
                )
            part.path = path

    def digest(self) -> str:
        """What the report of loading it will say, without loading: where the hub states a file's sha256, the file is
        not even fetched."""
        remote = [part.name for part in self.parts if part.path is None]
        stated = {name: self._listing.files[name].sha256 for name in remote} if self._listing else {}
        if None in stated.values():
            self.fetch()
        digests = {}
        for part in self.parts:
            digest = f"sha256:{stated[part.name]}" if part.path is None else file_digest(part.path)
            digests[Path(part.name).name] = digest
        return joint_digest(digests, self.source)

    def read(self, key: str) -> Tensor:
        """The tensor as stored, its pages brought in; in place where the file allows it."""
        part = self.where[key]
        if part.loaded is not None:
            return part.loaded[key]
        tensor = self.lazily(key)
        assert part.mapping is not None
        part.mapping.populate(part.tensors[key])
        return tensor

    def lazily(self, key: str) -> Tensor:
        """The tensor as stored, its pages left to be read when touched."""
        part = self.where[key]
        if part.loaded is not None:
            return part.loaded[key]
        if part.mapping is None:
            if part.path is None:
                raise RuntimeError("fetch() comes before reading")
            part.mapping = MappedFile(part.path)
        return part.mapping.tensor(part.tensors[key])

    def release(self, key: str) -> None:
        """Give back the memory of a tensor that was copied elsewhere."""
        part = self.where[key]
        if part.loaded is not None:
            part.loaded.pop(key, None)
        elif part.mapping is not None:
            part.mapping.release(part.tensors[key])


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open whatever ``source`` names: of remote safetensors only the headers are fetched (files of ``torch.save`` have
    no header that could be, and are downloaded).

    Raises:
        CheckpointError: nothing is there, or it is not weights, or it is damaged; with what to do.
    """
    parsed = parse_source(source)
    try:
        if isinstance(parsed, LocalSource):
            return _open_local(parsed, os.fspath(source))
        return _open_remote(parsed) if isinstance(parsed, HubSource) else Checkpoint(os.fspath(source), [], [])
    except OSError as error:
        raise CheckpointError(f"{str(source)[:200]} cannot be read: {error.strerror or error}") from None


def _open_local(source: LocalSource, name: str) -> Checkpoint:
    path, notices = source.path, []
    if not path.is_dir():
        sibling = path.with_name(path.name + ".index.json")
        if not path.exists() and sibling.is_file():
            choice = Choice(index=sibling.name, notices=(f"{path} is stored in shards; reading them by its index",))
        else:
            choice = Choice(index=path.name) if kind_of(path) == "index" else Choice((path.name,))
        folder = path.parent
    else:
        folder = path
        choice = choose(_names(folder), "", str(folder).rstrip("/"))
    notices += choice.notices
    table = None
    files = choice.files
    if choice.index is not None:
        index = folder / choice.index
        file_size(index)
        table = read_index(_read(index), str(index))
        files = tuple(dict.fromkeys(beside(choice.index, shard) for shard in table.values()))
        absent = [file for file in files if not os.path.lexists(folder / file)]
        if absent:
            raise CheckpointError(
                f"{index} names {len(files)} shards, of which {len(absent)} are not there: {', '.join(absent[:5])}; "
                "download them into the same folder"
            )
    parts = [_open_file(folder / file, source.entry, notices) for file in files]
    checkpoint = Checkpoint(name, parts, notices)
    _check_index(checkpoint, table)
    return checkpoint


def _open_remote(source: HubSource) -> Checkpoint:
    found = hub.list_files(source.repo, source.revision)
    if isinstance(found, Path):
        return _open_local(LocalSource(found / source.path, source.entry), str(source))
    choice = choose(found.files, source.path, source.repo)
    notices, table, files = list(choice.notices), None, choice.files
    if choice.index is not None:
        table = read_index(_read(hub.download(found, [choice.index])[0]), f"{source.repo}/{choice.index}")
        files = tuple(dict.fromkeys(beside(choice.index, shard) for shard in table.values()))
        absent = [file for file in files if file not in found.files]
        if absent:
            raise CheckpointError(
                f"{source.repo}/{choice.index} names {len(files)} shards, of which the repository lacks "
                f"{', '.join(absent[:5])}; tell its author, or try another revision"
            )
    parts = []
    for file in files:
        first = hub.first_bytes(found, file, ENOUGH)
        if kind_of_bytes(first, found.files[file].size, f"{source.repo}/{file}") == "safetensors":
            header = hub.read_remote_header(found, file)
            parts.append(Part(file, header.tensors, metadata=header.metadata))
        else:
            parts.append(_open_file(hub.download(found, [file])[0], source.entry, notices))
    checkpoint = Checkpoint(str(source), parts, notices, found)
    _check_index(checkpoint, table)
    return checkpoint


def _open_file(path: Path, entry: str | None, notices: list[str]) -> Part:
    kind = kind_of(path)
    ending = path.suffix.lower()
    if kind == "index":
        raise CheckpointError(f"{path} is JSON text, not weights: {_read(path)[:80].decode(errors='replace')!r}")
    if kind == "safetensors":
        if ending and ending not in (".safetensors", ".sft"):
            notices.append(f"{path.name} is a safetensors file in spite of its name, and read as one")
        if entry is not None:
            raise CheckpointError(f"{path} is a safetensors file, which has no entries to choose from; drop #{entry}")
        header = read_file_header(path)
        return Part(path.name, header.tensors, path, metadata=header.metadata)
    if ending == ".safetensors":
        notices.append(f"{path.name} is a file of torch.save in spite of its name, and read as one")
    pickled = read_pickle(path, kind, entry)
    notices += pickled.notices
    return Part(path.name, pickled.tensors, path, pickled.loaded)


def _check_index(checkpoint: Checkpoint, table: dict[str, str] | None) -> None:
    """Every key lies in the shard that the index names."""
    for key, shard in (table or {}).items():
        part = checkpoint.where.get(key)
        if part is None or part.name.rpartition("/")[2] != shard:
            held = f"it is in {part.name}" if part else "it is in none"
            raise CheckpointError(f"{checkpoint.source}: the index says that {key} is in {shard}, but {held}")


def _names(folder: Path) -> list[str]:
    """Files of a folder and of the folders in it, relative, with ``/``."""
    try:
        here = sorted(folder.iterdir())
        inner = [file for place in here if place.is_dir() for file in sorted(place.iterdir()) if not file.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return [file.relative_to(folder).as_posix() for file in [*(f for f in here if not f.is_dir()), *inner]]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(25_000_001)
