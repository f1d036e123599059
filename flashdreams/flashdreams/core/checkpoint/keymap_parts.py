"""Entries of a key map that take one tensor apart, or put several together: fused projections."""

from __future__ import annotations

from dataclasses import dataclass

from flashdreams.core.checkpoint.keymap_patterns import compile_glob, fill_glob
from flashdreams.core.checkpoint.keymap_tensors import Join, KeyMapError, Names, Planned, Slice, collect


@dataclass(frozen=True)
class Split:
    """One tensor becomes several, in order along ``dim``; of equal size, or of ``sizes``."""

    pattern: str
    into: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_parts(self.pattern, self.into, self.sizes)

    def run(self, names: Names) -> Names:
        regex = compile_glob(self.pattern)
        pairs: list[tuple[str, Planned]] = []
        for key, tensor in names.items():
            match = regex.fullmatch(key)
            if match is None:
                pairs.append((key, tensor))
                continue
            start = 0
            for part, size in zip(self.into, self._sizes_of(key, tensor), strict=True):
                pairs.append((fill_glob(part, match.groups()), Slice(tensor, self.dim, start, size)))
                start += size
        return collect(pairs)

    def _sizes_of(self, key: str, tensor: Planned) -> tuple[int, ...]:
        count = len(self.into)
        length = tensor.shape[self.dim] if self.dim < len(tensor.shape) else 0
        sizes = self.sizes or (length // count,) * count
        if not length or sum(sizes) != length:
            expected = f"{sum(sizes)} rows" if self.sizes else f"a multiple of {count} rows"
            raise KeyMapError(
                f"{key!r} is {list(tensor.shape)}; to split it along dim {self.dim} into {count} parts it needs "
                f"{expected} there"
            )
        return sizes

    def inverse(self) -> Fuse:
        return Fuse(self.into, self.pattern, self.dim, self.sizes)


@dataclass(frozen=True)
class Fuse:
    """Several tensors become one, in the order of ``parts`` along ``dim``; of equal size, or of ``sizes``."""

    parts: tuple[str, ...]
    into: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_parts(self.into, self.parts, self.sizes)

    def run(self, names: Names) -> Names:
        regexes = [compile_glob(part) for part in self.parts]
        found: dict[tuple[str, ...], dict[int, str]] = {}
        home: dict[str, tuple[str, ...]] = {}
        for key in names:
            for index, regex in enumerate(regexes):
                if match := regex.fullmatch(key):
                    found.setdefault(match.groups(), {})[index] = key
                    home[key] = match.groups()
        pairs: list[tuple[str, Planned]] = []
        for key, tensor in names.items():
            if key not in home:
                pairs.append((key, tensor))
            elif texts := found.pop(home[key], None):
                pairs.append((fill_glob(self.into, home[key]), self._join(home[key], texts, names)))
        return collect(pairs)

    def _join(self, texts: tuple[str, ...], keys: dict[int, str], names: Names) -> Join:
        whole = fill_glob(self.into, texts)
        lacking = [fill_glob(part, texts) for index, part in enumerate(self.parts) if index not in keys]
        if lacking:
            raise KeyMapError(f"{whole!r} is made of {len(self.parts)} tensors; there is no {lacking[0]!r}")
        parts = [names[keys[index]] for index in range(len(self.parts))]
        first = parts[0].shape
        if self.dim >= len(first):
            raise KeyMapError(f"{keys[0]!r} is {list(first)}; it has no dim {self.dim} to fuse along")
        for index, (part, size) in enumerate(zip(parts, self.sizes or (first[self.dim],) * len(parts), strict=True)):
            expected = (*first[: self.dim], size, *first[self.dim + 1 :])
            if part.shape != expected:
                raise KeyMapError(
                    f"{keys[index]!r} is {list(part.shape)}; as a part of {whole!r} it must be {list(expected)}"
                )
        return Join(tuple(parts), self.dim)

    def inverse(self) -> Split:
        return Split(self.into, self.parts, self.dim, self.sizes)


def _check_parts(whole: str, parts: tuple[str, ...], sizes: tuple[int, ...] | None) -> None:
    if len(parts) < 2 or len({part.count("*") for part in (whole, *parts)}) != 1:
        raise KeyMapError(f"{whole!r} and its parts {parts}: expected two parts or more, with as many * in each name")
    if sizes is not None and len(sizes) != len(parts):
        raise KeyMapError(f"{whole!r} has {len(parts)} parts, but {len(sizes)} sizes")
