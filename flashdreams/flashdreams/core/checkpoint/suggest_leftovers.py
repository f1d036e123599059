"""Tensors that no equal shape on the other side explains: fused, transposed, or just not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flashdreams.core.checkpoint.suggest_fused import find_bundles
from flashdreams.core.checkpoint.suggest_names import decide_some
from flashdreams.core.checkpoint.suggest_numbers import Context
from flashdreams.core.checkpoint.suggest_outcome import Doubt, Link, Match
from flashdreams.core.checkpoint.suggest_tree import Alignment, Group, Node, turn
from flashdreams.core.checkpoint.suggest_words import Name, name_of


def place_leftovers(scope: tuple[Node, Node], alignment: Alignment, match: Match) -> bool:
    """Tensors without a counterpart of equal shape: fused, split or transposed ones, and those that are just not
    on the other side. Returns whether some of the last are on either side."""
    extra, missing = alignment.extra, alignment.missing
    bundles = find_bundles(scope, extra, missing)
    match.bundles += bundles
    taken = {id(node) for bundle in bundles for node in (bundle.whole, *bundle.parts)}
    extra = [node for node in extra if id(node) not in taken]
    missing = [node for node in missing if id(node) not in taken]
    buckets: dict[object, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
    has_biases = all(any(leaf.is_bias for leaf in node.tensors) for node in scope)
    for side, nodes in enumerate((extra, missing)):
        for node in nodes:
            buckets[turn(node.shape), has_biases and node.is_bias][side].append(node)
    for sources, targets in buckets.values():
        if len(sources) == len(targets):
            alignment.groups.append(Group(sources, targets, "turned"))
        elif sources and targets:
            _place_some(scope, sources, targets, match)
        else:
            _leave(sources, targets, missing if sources else extra, match)
    unmatched = [(bool(one), bool(two)) for one, two in buckets.values() if len(one) != len(two)]
    return any(one for one, _ in unmatched) and any(two for _, two in unmatched)


def _place_some(scope: tuple[Node, Node], sources: list[Node], targets: list[Node], match: Match) -> None:
    """More tensors of one shape on one side than on the other."""
    if len(sources) < len(targets):
        pairs = decide_some(*names_below(scope, sources, targets), Context())
        match.links += [Link(sources[index], targets[other], scope, why) for index, other, why in pairs]
        if pairs:
            found = {other for _, other, _ in pairs}
            _leave([], [node for at, node in enumerate(targets) if at not in found], (), match)
            return
    why = f"{len(sources)} tensors of shape {list(sources[0].shape or ())} for {len(targets)} places"
    match.doubts.append(Doubt(sources, targets, why))


def _leave(sources: list[Node], targets: list[Node], others: Sequence[Node], match: Match) -> None:
    """Tensors of a shape that the other side lacks; ``others`` are what that side has left."""
    for node in (*sources, *targets):
        shape = list(node.shape or ())
        why = f"the {'model' if node in sources else 'checkpoint'} has no tensor of shape {shape} there"
        fused = [other for other in others if _may_hold(other, node) or _may_hold(node, other)]
        if fused:
            names = ", ".join(f"{other.key} {list(other.shape or ())}" for other in fused[:3])
            why += f"; {names} may be fused with it or split from it, but no name says in which order"
        match.doubts.append(Doubt([node], [], why) if node in sources else Doubt([], [node], why))


def _may_hold(whole: Node, part: Node) -> bool:
    """Whether ``part`` may be some of the rows of ``whole``."""
    if not whole.shape or not part.shape:
        return False
    (rows, *rest), (fewer, *other) = whole.shape, part.shape
    return rest == other and rows > fewer > 0 and rows % fewer == 0


def names_below(scope: tuple[Node, Node], sources: list[Node], targets: list[Node]) -> tuple[list[Name], list[Name]]:
    """The names of nodes of both sides, below their modules."""
    first, second = scope
    return [_name_below(first, node) for node in sources], [_name_below(second, node) for node in targets]


def _name_below(scope: Node, node: Node) -> Name:
    """The name with the index of a list of one thing: ``gate.0``."""
    path = node.below(scope)
    while len(node.children) == 1 and (part := next(iter(node.children))).isdecimal():
        path, node = (*path, part), node.children[part]
    return name_of(path)
