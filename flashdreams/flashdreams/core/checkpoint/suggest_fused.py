"""Projections that one side keeps as one tensor and the other as several."""

from __future__ import annotations

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
        found = {id(whole): _parts_of(whole, parts, own, other) for whole in wholes}
        for whole in wholes:
            rivals = [one for one in wholes if found[id(one)] and set(found[id(one)]) & set(found[id(whole)])]
            named = [one for one in rivals if one.path[-1] == found[id(one)][0].path[-1]] or rivals
            if named == [whole]:
                bundles.append(Bundle(whole, found[id(whole)], is_source, scope))
    return bundles


def _parts_of(whole: Node, free: list[Node], own: Node, other: Node) -> tuple[Node, ...]:
    name = name_of(whole.below(own))
    names = {id(node): name_of(node.below(other)) for node in free}
    shape = whole.shape or ()
    found: list[Node] = []
    strange: set[frozenset[str]] = set()
    for part in spelled_parts(name):
        fits = [node for node in free if part in names[id(node)].words and _fits(node, whole)]
        extra = {id(node): names[id(node)].telling - {part} - name.words for node in fits}
        shared = {id(node): len((names[id(node)].telling - {part}) & name.words) for node in fits}
        best = min(((len(extra[id(node)]), -shared[id(node)]) for node in fits), default=None)
        fits = [node for node in fits if (len(extra[id(node)]), -shared[id(node)]) == best]
        if len(fits) != 1:
            return ()
        found += fits
        strange.add(extra[id(fits[0])])
    rows = sum(node.shape[0] for node in found if node.shape)
    # Parts of one thing have the same words beside q, k and v: `add_k` is none of to_q, to_k and to_v.
    return tuple(found) if len(strange) == 1 and shape and rows == shape[0] else ()


def _fits(node: Node, whole: Node) -> bool:
    """Whether ``node`` may be some of the rows of ``whole``."""
    shape, rows = node.shape or (), whole.shape or ()
    return len(shape) == len(rows) > 0 and shape[1:] == rows[1:] and shape < rows and node.is_bias == whole.is_bias
