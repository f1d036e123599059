"""Which files of a folder or repository are the weights, and what the index of a sharded checkpoint says."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashdreams.core.checkpoint.errors import CheckpointError

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
"""Endings of files of weights, the preferred one first."""

INDEX = ".index.json"
_MAX_INDEX = 25_000_000
_VARIANT = re.compile(r"\.(?:fp16|bf16|fp32|non_ema|ema)\.", re.IGNORECASE)
_BESIDE = re.compile(r"optim|sched|training_args|rng_state|random_states", re.IGNORECASE)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")


@dataclass(frozen=True)
class Choice:
    """The files to read: shards in order, or one file; ``index`` is the JSON that names the shards, if there is one."""

    files: tuple[str, ...] = ()
    index: str | None = None
    notices: tuple[str, ...] = ()


def choose(names: Iterable[str], path: str, where: str) -> Choice:
    """What ``path`` stands for among ``names`` (relative, with ``/``): a file, a sharded file, or a folder's weights.

    Args:
        path: empty for the root.
        where: how messages call the place.

    Raises:
        CheckpointError: nothing there are weights, or several files are and none is marked as the one.
    """
    names = sorted(names)
    if path in names:
        return Choice(index=path) if path.endswith(".json") else Choice((path,))
    if path + INDEX in names:
        return Choice(index=path + INDEX, notices=(f"{where}/{path} is stored in shards; reading them by its index",))
    folder = f"{path}/" if path else ""
    inside = [name for name in names if name.startswith(folder)]
    if path and not inside:
        near = difflib.get_close_matches(path, [n for n in names if n.endswith(WEIGHTS)] or names, n=3, cutoff=0.3)
        raise CheckpointError(f"{where} has no {path}" + (f"; nearest: {', '.join(near)}" if near else ""))
    here = [name for name in inside if "/" not in name.removeprefix(folder)]
    indexes = _plain([name for name in here if name.endswith(INDEX) and name.removesuffix(INDEX).endswith(WEIGHTS)])
    for ending in WEIGHTS:
        listed = [name for name in indexes if name.removesuffix(INDEX).endswith(ending)]
        files = _plain([name for name in here if name.endswith(ending)])
        if len(listed) == 1:
            return Choice(index=listed[0])
        if len(listed) > 1:
            _ambiguous(where, folder, listed)
        if shards := _complete(files, where):
            return Choice(shards)
        if len(files) == 1:
            return Choice((files[0],))
        if files:
            _ambiguous(where, folder, files)
    below = sorted({name.rpartition("/")[0] for name in inside if name.endswith(WEIGHTS)})
    if len(below) == 1:
        return choose(names, below[0], where)
    if below:
        raise CheckpointError(f"{where}/{folder} has weights in several folders ({', '.join(below[:8])}); name one")
    held = ", ".join(name.removeprefix(folder) for name in inside[:6]) or "nothing"
    raise CheckpointError(
        f"{where}/{folder} has no weights ({', '.join('*' + ending for ending in WEIGHTS)}); it holds {held}"
    )


def read_index(data: bytes, index: str) -> dict[str, str]:
    """``{key: shard}`` of the JSON ``data``; shards are plain names beside the index.

    Raises:
        CheckpointError: it is damaged, or names a file outside its folder, an index, or no file of weights.
    """
    try:
        if len(data) > _MAX_INDEX:
            raise ValueError(f"it has {len(data)} bytes; at most {_MAX_INDEX} are read")
        content = json.loads(data.decode(), object_pairs_hook=_unique)
        table = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(table, dict) or not table:
            raise ValueError("it has no weight_map")
        for key, shard in table.items():
            if not isinstance(shard, str):
                raise ValueError(f"{key!r} lies in {shard!r}, which is no file name")
            if "/" in shard or "\\" in shard or shard in ("", ".", "..") or "\0" in shard:
                raise ValueError(f"{key!r} lies in {shard[:80]!r}, which is not a file beside the index")
            if not shard.endswith(WEIGHTS):
                raise ValueError(f"{key!r} lies in {shard[:80]!r}, which is no file of weights")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {str(error)[:200]}; download it again") from None
    return table


def beside(index: str, shard: str) -> str:
    """The shard's name, seen from where ``index`` is seen."""
    folder, slash, _ = index.rpartition("/")
    return folder + slash + shard


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands in it twice")
    return result


def _plain(names: list[str]) -> list[str]:
    """Without hidden files, training state, and the half-precision and other variants of plain files that are there."""
    bare = {name: name.rpartition("/")[2] for name in names}
    names = [name for name in names if not bare[name].startswith(".")]
    names = [name for name in names if not _BESIDE.search(bare[name])] or names
    return [name for name in names if not _VARIANT.search(bare[name])] or names


def _complete(files: list[str], where: str) -> tuple[str, ...]:
    """``files``, if they are the numbered shards of one checkpoint."""
    matches = [match for name in files if (match := _SHARD.fullmatch(name))]
    if not matches or len(matches) != len(files) or len({(m["stem"], m["count"]) for m in matches}) != 1:
        return ()
    missing = set(range(1, int(matches[0]["count"]) + 1)) - {int(m["number"]) for m in matches}
    if missing:
        raise CheckpointError(
            f"{where} has {len(files)} of {int(matches[0]['count'])} shards of {matches[0]['stem']}; number "
            f"{', '.join(map(str, sorted(missing)[:5]))} is missing: download it"
        )
    return tuple(files)


def _ambiguous(where: str, folder: str, files: list[str]) -> None:
    raise CheckpointError(f"{where}/{folder} has several files of weights ({', '.join(files[:8])}); name one")
