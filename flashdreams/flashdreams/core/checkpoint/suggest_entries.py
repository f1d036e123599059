"""From matched trees to what a key map needs: entries for tensors that change, and renames in pieces for the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from flashdreams.core.checkpoint.keymap_parts import Fuse, Split
from flashdreams.core.checkpoint.keymap_patterns import compile_glob
from flashdreams.core.checkpoint.keymap_steps import Reshape, Transpose
from flashdreams.core.checkpoint.keymap_tensors import Shape
from flashdreams.core.checkpoint.suggest_fused import Bundle
from flashdreams.core.checkpoint.suggest_outcome import Match
from flashdreams.core.checkpoint.suggest_rules import Piece
from flashdreams.core.checkpoint.suggest_tree import Node, squeeze
from flashdreams.core.checkpoint.suggest_words import template_of

Entry = Fuse | Split | Reshape | Transpose
Pieces = dict[str, list[Piece]]
_KINDS = ("flatten", "transpose", "view")


def entries_of(match: Match, shapes: Mapping[str, Shape]) -> tuple[list[Entry], dict[str, str], Pieces]:
    """Entries, in order; then the renames after them, key by key, and the pieces these consist of."""
    above = {(link.source.path, link.target.path): link for link in match.links}

    def pieces_down_to(ends: tuple[Node, Node]) -> list[Piece]:
        pieces: list[Piece] = []
        scope = ends
        while link := above.get((scope[0].path, scope[1].path)):
            scope = link.scope
            if scope[0].path and all(node.is_layer for node in scope):
                continue  # within one layer, nesting is part of the name
            pieces.append(Piece(scope[0].path, ends[0].below(scope[0]), ends[1].below(scope[1])))
            ends = scope
        return pieces[::-1]

    renames: dict[str, str] = {}
    pieces: Pieces = {}
    changed: dict[tuple[str, str], list[tuple[str, Shape, Shape]]] = defaultdict(list)
    for link in match.links:
        source, target = link.source, link.target
        if source.shape is None or target.shape is None:
            continue
        renames[source.key], pieces[source.key] = target.key, pieces_down_to((source, target))
        for kind, before, after in _changes(source.shape, target.shape, source.key in match.turned):
            changed[kind, template_of(source.key)].append((source.key, before, after))
    entries: list[Entry] = []
    for (kind, _), found in sorted(changed.items(), key=lambda item: _KINDS.index(item[0][0])):
        patterns = patterns_for([key for key, _, _ in found], shapes)
        alike = len({change[1:] for change in found}) == 1
        for pattern, before, after in [(pattern, *found[0][1:]) for pattern in patterns] if alike else found:
            entries.append(Transpose(pattern) if kind == "transpose" else Reshape(pattern, before, after))
    bundles: dict[tuple[str, ...], list[Bundle]] = defaultdict(list)
    for bundle in match.bundles:
        before = pieces_down_to(bundle.scope)
        for node, middle in zip(bundle.inner, _middles(bundle, shapes), strict=True):
            own, other = bundle.scope
            last = Piece(own.path, tuple(middle.split("."))[len(own.path) :], node.below(other))
            renames[middle], pieces[middle] = node.key, [*before, last]
        bundles[tuple(template_of(node.key) for node in (*bundle.outer, *bundle.inner))].append(bundle)
    for found in bundles.values():
        entries += _bundle_entries(found, shapes)
    return entries, renames, pieces


def _changes(before: Shape, after: Shape, is_turned: bool) -> list[tuple[str, Shape, Shape]]:
    """The steps from one shape to the other: a matrix with further axes of size 1 loses these before it is turned."""
    flat = squeeze(before)
    if not is_turned and flat == squeeze(after):
        return [("view", before, after)] if before != after else []
    steps = [("flatten", before, flat), ("transpose", flat, flat[::-1]), ("view", flat[::-1], after)]
    return [step for step in steps if step[0] == "transpose" or step[1] != step[2]]


def _middles(bundle: Bundle, every: Container[str]) -> list[str]:
    """Names between fusing (or splitting) and renaming: in the checkpoint's module, as the model calls them in its.
    One level deeper, where the checkpoint has other tensors of these names."""
    own, other = bundle.scope
    rests = [node.below(other) for node in bundle.inner]
    names = [".".join((*own.path, *rest)) for rest in rests]
    if any(name in every for name in names):
        return [".".join((*bundle.outer[0].path[:-1], *rest)) for rest in rests]
    return names


def patterns_for(keys: Sequence[str], every: Iterable[str]) -> list[str]:
    """One pattern for ``keys``, which differ by numbers only, if it fits no other of ``every``; else the keys."""
    pattern = _starred(keys[0])
    regex = compile_glob(pattern)
    fits = len(keys) > 1 and {key for key in every if regex.fullmatch(key)} == set(keys)
    return [pattern] if fits else list(keys)


def _starred(key: str) -> str:
    return re.sub(r"\d+", "*", key)


def _bundle_entries(found: list[Bundle], every: Mapping[str, Shape]) -> list[Entry]:
    """Entries for bundles whose keys differ by numbers only: one for all, if these are the same in every name."""
    names = [([node.key for node in bundle.outer], _middles(bundle, every)) for bundle in found]
    sizes = [_sizes(bundle) for bundle in found]
    starred = {str([_starred(key) for key in inner]) for _, inner in names}
    alike = len(starred) == 1 and all(
        len({tuple(re.findall(r"\d+", key)) for key in (*outer, *inner)}) == 1 for outer, inner in names
    )
    columns = [[outer[at] for outer, _ in names] for at in range(len(names[0][0]))]
    if alike and len(set(sizes)) == 1 and all(len(patterns_for(column, every)) < len(column) for column in columns):
        names = [([_starred(key) for key in names[0][0]], [_starred(key) for key in names[0][1]])]
    entries: list[Entry] = []
    for bundle, (outer, inner), size in zip(found, names, sizes, strict=False):
        if bundle.whole_is_source:
            entries.append(Split(outer[0], tuple(inner), 0, size))
        else:
            entries.append(Fuse(tuple(outer), inner[0], 0, size))
    return entries


def _sizes(bundle: Bundle) -> tuple[int, ...] | None:
    rows = tuple(node.shape[0] for node in bundle.parts if node.shape)
    return None if len(set(rows)) == 1 else rows
