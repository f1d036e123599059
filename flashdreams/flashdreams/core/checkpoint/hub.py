"""Repositories of the hub: what is in them, headers read from afar, and downloads that go on where they stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashdreams.core.caches import writable
from flashdreams.core.checkpoint.digest import hash_file, remember
from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.header import Header, header_length, parse_header
from flashdreams.core.checkpoint.hub_errors import explain, is_unreachable
from flashdreams.core.notices import say_once

_FIRST = 1 << 20
"""Bytes of the first request for a header; nearly every header fits."""


@dataclass(frozen=True)
class RemoteFile:
    """Size in bytes, and the sha256 that the hub states for files of weights."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a revision, which is this commit now."""

    repo: str
    revision: str
    commit: str
    files: dict[str, RemoteFile]


def list_files(repo: str, revision: str) -> Listing | Path:
    """What ``repo`` holds at ``revision``; offline, the folder of its cached copy.

    Raises:
        CheckpointError: no such repository or revision, no access, or no network and nothing cached.
    """
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # transports differ between versions of the library; explain() tells them apart
        folder = _cached_copy(repo, revision) if is_unreachable(error) else None
        if folder is None:
            raise explain(error, repo, revision) from None
        if not constants.is_offline_mode():
            say_once(f"the hub cannot be reached; using the cached copy {folder.name[:8]} of {repo}")
        return folder
    files = {
        file.rfilename: RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or []
    }
    return Listing(repo, revision, info.sha or revision, files)


def read_remote_header(listing: Listing, name: str) -> Header:
    """The header of a remote safetensors file; of the file itself only the first bytes travel.

    Raises:
        CheckpointError: it cannot be fetched, or is damaged.
    """
    size = listing.files[name].size
    shown = f"{listing.repo}/{name}"
    data = first_bytes(listing, name, _FIRST)
    length = header_length(data[:8], size, shown)
    if 8 + length > len(data):
        data = first_bytes(listing, name, 8 + length)
    return parse_header(data[8 : 8 + length], size, shown)


def download(listing: Listing, names: Iterable[str]) -> list[Path]:
    """Local paths of the files ``names``, fetched where the cache lacks them.

    Downloads go on where an earlier one stopped, in this process or another; several processes that want one file wait
    for one of them; bytes that do not have the stated sha256 are thrown away.

    Raises:
        CheckpointError: no access, no network, no space, or damaged twice.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    names = list(names)
    paths = {}
    for name in names:
        for place in cache_folders():
            found = try_to_load_from_cache(listing.repo, name, cache_dir=place, revision=listing.commit)
            if isinstance(found, str):
                paths[name] = Path(found)
    wanted = [name for name in names if name not in paths]
    if not wanted:
        return [paths[name] for name in names]
    folder = cache_folders()[0]
    _check_space(folder, listing, wanted)
    for name in wanted:
        try:
            _fetch(listing, name, folder)
            found = hf_hub_download(listing.repo, name, revision=listing.commit, cache_dir=folder)
        except CheckpointError:
            raise
        except Exception as error:  # as above
            raise explain(error, listing.repo, listing.commit, name) from None
        paths[name] = Path(found)
    if listing.revision != listing.commit:  # so that the revision is found without a network too
        reference = _store(folder, listing.repo) / "refs" / listing.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(listing.commit)
    return [paths[name] for name in names]


def cache_folders() -> list[Path]:
    """Where the hub's files lie: first the folder that new ones go to, then one that can only be read, if there is."""
    from huggingface_hub import constants

    usual = Path(constants.HF_HUB_CACHE)
    folder = writable(usual, "HF_HOME")
    return [folder] if folder == usual or not usual.is_dir() else [folder, usual]


def _cached_copy(repo: str, revision: str) -> Path | None:
    for folder in cache_folders():
        reference = _store(folder, repo) / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        copy = _store(folder, repo) / "snapshots" / commit
        if copy.is_dir():
            return copy
    return None


def first_bytes(listing: Listing, name: str, count: int) -> bytes:
    """The first ``count`` bytes of a remote file, or all if it has fewer.

    Raises:
        CheckpointError: they cannot be fetched.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    count = min(count, listing.files[name].size)
    if not count:
        return b""
    url = hf_hub_url(listing.repo, name, revision=listing.commit)
    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    data = bytearray()
    try:
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, max_retries=2
        ) as response:
            hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= count:  # a server without ranges would send the whole file
                    break
    except Exception as error:  # as above
        raise explain(error, listing.repo, listing.commit, name) from None
    if len(data) < count:
        raise CheckpointError(f"{listing.repo}/{name}: {count} bytes of header asked, {len(data)} arrived; try again")
    return bytes(data[:count])


def _fetch(listing: Listing, name: str, folder: Path) -> None:
    """Bring a file of weights into the hub's cache by plain ranges, keeping what arrived when it stops.

    The library itself starts anew after a process was stopped. Files of its chunk store (Xet) are left to it, and so
    are small ones.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, is_xet_available
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    file = listing.files[name]
    if file.sha256 is None:
        return
    url = hf_hub_url(listing.repo, name, revision=listing.commit)
    if is_xet_available() and get_hf_file_metadata(url).xet_file_data is not None:
        return
    blob, partial = _blob(folder, listing, name), _partial(folder, listing, name)
    lock = folder / ".locks" / blob.parent.parent.name / f"{file.sha256}.lock"
    for place in (blob, lock):
        place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        for last in (False, True):
            if blob.exists():
                return
            with partial.open("ab") as out:
                if out.tell() > file.size:
                    out.truncate(0)
                arrived = out.seek(0, 2)
                http_get(
                    url, out, resume_size=arrived, headers=build_hf_headers(), expected_size=file.size,
                    displayed_filename=name,
                )  # fmt: skip
            if hash_file(partial) == file.sha256:
                partial.replace(blob)
                remember(blob, file.sha256)
                return
            partial.unlink(missing_ok=True)
            if last:
                raise CheckpointError(
                    f"{listing.repo}/{name} arrived damaged twice (its sha256 is not the stated {file.sha256[:12]}..); "
                    "a proxy may change it: try another network"
                )
            say_once(f"{listing.repo}/{name} arrived damaged; fetching it again")


def _store(folder: Path, repo: str) -> Path:
    """Where the hub's library keeps a repository: bytes in ``blobs``, links to them by commit in ``snapshots``."""
    from huggingface_hub.file_download import repo_folder_name

    return folder / repo_folder_name(repo_id=repo, repo_type="model")


def _blob(folder: Path, listing: Listing, name: str) -> Path:
    return _store(folder, listing.repo) / "blobs" / str(listing.files[name].sha256)


def _partial(folder: Path, listing: Listing, name: str) -> Path:
    blob = _blob(folder, listing, name)
    return blob.with_name(blob.name + ".partial")


def _check_space(folder: Path, listing: Listing, names: list[str]) -> None:
    """Refuse before the first byte what the disk cannot take."""
    parts = [(listing.files[name].size, _partial(folder, listing, name)) for name in names]
    need = sum(size - (partial.stat().st_size if partial.exists() else 0) for size, partial in parts)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise CheckpointError(
            f"{listing.repo} needs {need / 2**30:.1f} GiB more in the cache folder {folder}, which has "
            f"{free / 2**30:.1f} GiB free; make room, or set HF_HOME to a folder on a larger disk"
        )
