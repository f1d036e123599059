"""Projections that one side keeps as one tensor and the other as several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashdreams.core.checkpoint.suggest_tree import Node
from flashdreams.core.checkpoint.suggest_words import name_of, spelled_parts


@dataclass(frozen=True)
class Bundle:
    """``whole`` holds ``parts`` one after the other along its first axis; found in the pair of modules ``scope``."""

    whole: Node
    parts: tuple[Node, ...]
    whole_is_source: bool
    scope: tuple[Node, Node]

    @property
    def outer(self) -> tuple[Node, ...]:
        """The checkpoint's tensors."""
        return (self.whole,) if self.whole_is_source else self.parts

    @property
    def inner(self) -> tuple[Node, ...]:
        """The model's tensors."""
        return self.parts if self.whole_is_source else (self.whole,)


def find_bundles(scope: tuple[Node, Node], sources: list[Node], targets: list[Node]) -> list[Bundle]:
    """The fused tensors among those left over whose names spell their parts (``qkv``) in terms of the other side's."""
    bundles: list[Bundle] = []
    for wholes, parts, own, other, is_source in (
        (targets, sources, scope[1], scope[0], False),
        (sources, targets, scope[0], scope[1], True),
    ):
        free = list(parts)
        for whole in wholes:
            found = _parts_of(whole, free, own, other)
            if found:
                bundles.append(Bundle(whole, found, is_source, scope))
                free = [node for node in free if node not in found]
    return bundles


def _parts_of(whole: Node, free: list[Node], own: Node, other: Node) -> tuple[Node, ...]:
    name = name_of(whole.below(own))
    shape = whole.shape or ()
    found: list[Node] = []
    for part in spelled_parts(name):
        fits = [node for node in free if _fits(node, shape) and part in name_of(node.below(other)).words]
        fits = _nearest(fits, name.words, part, other)
        if len(fits) != 1:
            return ()
        found += fits
    rows = sum(node.shape[0] for node in found if node.shape)
    return tuple(found) if found and shape and rows == shape[0] else ()


def _fits(node: Node, whole: tuple[int, ...]) -> bool:
    """Whether ``node`` may be rows of a tensor of shape ``whole``, its last part of the key being of the same kind."""
    return bool(node.shape) and len(node.shape) == len(whole) and node.shape[1:] == whole[1:] and node.shape < whole


def _nearest(nodes: Iterable[Node], words: frozenset[str], part: str, scope: Node) -> list[Node]:
    """Those that share most words with the whole beside the one that names the part, and add fewest."""
    scored = []
    for node in nodes:
        own = name_of(node.below(scope)).words - {part}
        scored.append(((-len(own & words), len(own - words)), node))
    best = min((score for score, _ in scored), default=None)
    return [node for score, node in scored if score == best]
