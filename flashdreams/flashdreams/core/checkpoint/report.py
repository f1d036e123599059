"""What a checkpoint and a module have in common: matched n of n, or exactly what is in the way."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, dtype

from flashdreams.core.checkpoint.digest import digest_then

Shape = tuple[int, ...]
_WORDS = re.compile(r"[a-z]+|\d+")


@dataclass(frozen=True)
class Match:
    """The comparison of a module's tensors (``total`` of them) with a checkpoint's, by key, shape and kind of number.

    ``allowed`` are absent by permission; ``formats`` are stored in a way the module cannot compute with; ``idle``
    are permissions for keys the module does not have.
    """

    total: int
    missing: dict[str, Shape]
    unexpected: dict[str, Shape]
    shapes: dict[str, tuple[Shape, Shape]]
    formats: dict[str, str]
    allowed: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything matches."""
        return not (self.missing or self.unexpected or self.shapes or self.formats)

    @property
    def summary(self) -> str:
        """``matched 825/825``, and what does not."""
        matched = self.total - len(self.missing) - len(self.shapes) - len(self.formats) - len(self.allowed)
        parts = [f"matched {matched}/{self.total}"]
        for count, what in (
            (len(self.missing), "missing"),
            (len(self.unexpected), "unexpected"),
            (len(self.shapes), "of another shape"),
            (len(self.formats), "of another kind of number"),
            (len(self.allowed), "absent by permission"),
        ):
            parts += [f"{count} {what}"] if count else []
        return ", ".join(parts)

    def lines(self, most: int | None = 5) -> list[str]:
        """What is in the way, at most ``most`` of each kind; each missing key with its nearest unexpected ones."""
        lines = []
        for key, shape in list(self.missing.items())[:most]:
            near = nearest(key, shape, self.unexpected)
            lines.append(f"missing {key} {list(shape)}" + (f"; nearest: {', '.join(near)}" if near else ""))
        lines += [f"unexpected {key} {list(shape)}" for key, shape in list(self.unexpected.items())[:most]]
        for key, (given, wanted) in list(self.shapes.items())[:most]:
            lines.append(f"{key} is {list(given)}, expected {list(wanted)}")
        lines += [f"{key} is stored as {what}" for key, what in list(self.formats.items())[:most]]
        return lines + [f"allow_missing names {pattern!r}, which is no key of the model" for pattern in self.idle]


def compare(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], allow_missing: Iterable[str], asked: dtype
) -> Match:
    """Match a module's state dict against a checkpoint's (values are not looked at; both may be on meta).

    Args:
        allow_missing: keys that may be absent; ``*`` stands for a layer's number and for nothing else.
        asked: number format of the run; other narrow formats (int4, int8, fp8) need scales that nobody would apply.
    """
    permissions = {pattern: re.compile(re.escape(pattern).replace(r"\*", r"\d+")) for pattern in allow_missing}
    optional = {key for key in wanted if any(each.fullmatch(key) for each in permissions.values())}
    idle = tuple(pattern for pattern, each in permissions.items() if not any(map(each.fullmatch, wanted)))
    missing = {key: tuple(value.shape) for key, value in wanted.items() if key not in given and key not in optional}
    unexpected = {key: tuple(value.shape) for key, value in given.items() if key not in wanted}
    shapes: dict[str, tuple[Shape, Shape]] = {}
    formats: dict[str, str] = {}
    for key, value in wanted.items():
        stored = given.get(key)
        if stored is None:
            continue
        if not _fits(stored.dtype, value.dtype, asked):
            formats[key] = f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"
        elif stored.shape != value.shape:
            shapes[key] = tuple(stored.shape), tuple(value.shape)
    allowed = tuple(sorted(key for key in optional if key not in given))
    return Match(len(wanted), missing, unexpected, shapes, formats, allowed, idle)


def _fits(stored: dtype, wanted: dtype, asked: dtype) -> bool:
    if wanted.is_floating_point:
        return stored == asked or (stored.is_floating_point and stored.itemsize > 1)
    return not stored.is_floating_point and not stored.is_complex


def nearest(key: str, shape: Shape, among: Mapping[str, Shape], count: int = 3) -> list[str]:
    """The keys that share most words and numbers with ``key``; an equal shape weighs as much as half the words."""
    words = set(_WORDS.findall(key.lower()))

    def likeness(other: str) -> float:
        theirs = set(_WORDS.findall(other.lower()))
        return len(words & theirs) / max(len(words | theirs), 1) + 0.5 * (among[other] == shape)

    return [other for other in heapq.nlargest(count, among, likeness) if likeness(other) > 0]


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: the files, how many tensors they gave, and the keys they lacked by permission."""

    source: str
    files: tuple[Path, ...]
    tensors: int
    missing: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    states: tuple[tuple[int, ...], ...] = ()
    """Of each file before it was read, by which a later change is noticed."""

    @property
    def path(self) -> Path:
        """The first of the files."""
        return self.files[0] if self.files else Path(self.source)

    @cached_property
    def digests(self) -> dict[str, str]:
        """``sha256:<hex>`` of every file by its name; read when first asked for."""
        return {path.name: digest_then(path, state) for path, state in zip(self.files, self.states, strict=True)}

    @cached_property
    def digest(self) -> str:
        """One value for all files: the file's own sha256, or that of the shards' list; a seed for random weights."""
        return joint_digest(self.digests, self.source)


def joint_digest(digests: Mapping[str, str], source: str) -> str:
    """One value for the files of ``source``, from the digest of each by its name."""
    if not digests:
        return source
    if len(digests) == 1:
        return next(iter(digests.values()))
    listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return "sha256:" + hashlib.sha256(listing.encode()).hexdigest()
