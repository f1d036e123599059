"""What the whole says against links that looked right one by one: these are taken back, and left open."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

from flashdreams.core.checkpoint.suggest_numbers import ELIMINATED
from flashdreams.core.checkpoint.suggest_outcome import Link, Match
from flashdreams.core.checkpoint.suggest_support import unsupported
from flashdreams.core.checkpoint.suggest_tree import Node, squeeze, turn
from flashdreams.core.checkpoint.suggest_turned import block_of, item_of, judge_transposed
from flashdreams.core.checkpoint.suggest_words import name_of, spelled_parts

Path = tuple[str, ...]


def judge(match: Match) -> None:
    """Take back what is contradicted, until nothing is: what one doubt leaves may speak against another link."""
    judge_transposed(match)
    count = -1
    while count != (count := len(match.links) + len(match.bundles)):
        _judge_words(match)
        _judge_modules(match)
        _judge_leftovers(match)
        judge_transposed(match)
        match.doubt(unsupported(match), "its shape fits, but so may others, and of its name no word speaks for it")


def _judge_words(match: Match) -> None:
    """What is of queries, keys or values is so on both sides, in blocks where names say it on both; and what is called
    by all three is not another thing, while one of that name is left open."""
    said = {block_of(link.target) for link in match.tensors if _letters(link.source) & _letters(link.target)}
    left = {squeeze(leaf.shape) for leaf in (*match.left, *match.lacking) if _is_spelled(leaf)}
    wrong = [
        link
        for link in match.tensors
        if (block_of(link.target) in said and bool(_letters(link.source)) != bool(_letters(link.target)))
        or (squeeze(link.target.shape) in left and _is_spelled(link.source) != _is_spelled(link.target))
    ]
    match.doubt(wrong, "its shape fits, but of the two names just one is of a query, key or value")


def _judge_modules(match: Match) -> None:
    """A tensor is not linked to another module than the rest of its own, if that has another one itself (or tensors
    that are left open); nor a bias without its weight."""
    pairs = [(link.source, link.target) for link in match.tensors]
    every = [one for one, _ in pairs] + match.left, [other for _, other in pairs] + match.lacking
    modules = [_modules(leaves) for leaves in every]
    shapes = [{leaf.path: turn(leaf.shape) for leaf in leaves} for leaves in every]
    open_modules = [
        {own[leaf.path[:-1]] for leaf in leaves}
        for own, leaves in zip(modules, (match.left, match.lacking), strict=True)
    ]
    members: list[dict[Path, list[tuple[Node, Node]]]] = [defaultdict(list), defaultdict(list)]
    for pair in pairs:
        for side in (0, 1):
            members[side][modules[side][pair[side].path[:-1]]].append(pair)
    homes = {one.path[:-1]: other.path[:-1] for one, other in pairs if not one.is_bias}
    lacking = {leaf.path for leaf in match.lacking}
    crossed: list[Link] = []
    for link in match.tensors:
        pair = link.source, link.target
        home, other_home = (leaf.path[:-1] for leaf in pair)
        weights = [known.get((*leaf.path[:-1], "weight")) for known, leaf in zip(shapes, pair, strict=True)]
        unfit = None not in weights and weights[0] != weights[1]
        unfit |= (*other_home, "weight") in lacking
        alone = link.source.is_bias and (homes.get(home, other_home) != other_home or unfit)
        apart: list[bool | None] = []
        for side in (0, 1):
            module, there = modules[side][pair[side].path[:-1]], 1 - side
            beside = [one[there] for one in members[side][module] if one[side].path[:-1] != pair[side].path[:-1]]
            found = [leaf.path[:-2] for leaf in beside if item_of(leaf) == item_of(pair[there])]
            apart.append(_is_apart(pair[there].path[:-2], found))
            if apart[side] is None and module not in open_modules[side]:
                apart[side] = False
        if alone or (any(apart) and False not in apart):
            crossed.append(link)
    match.doubt(crossed, "its shape fits, but what is beside it in the two modules belongs to others")


def _judge_leftovers(match: Match) -> None:
    """A tensor of another name is not linked where that explains less than it leaves open: ``inv_freq`` is not the
    ``weight`` while a ``weight`` is left, nor if it would leave the weight beside it, nor if the model's module lacks
    its other tensors; ``weight_v`` is not, while ``weight_g`` is left. What was linked with such a tensor, or for want
    of another one, goes with it."""
    sources, targets = ({_role(leaf) for leaf in leaves} for leaves in (match.left, match.lacking))
    lamed = {leaf.path[:-1] for leaf in match.lacking}
    halves = {(leaf.path[:-1], _first_word(leaf)) for leaf in match.left}
    tensors = match.tensors
    homes = {
        link.source.path[:-1]: link.target.path[:-1]
        for link in tensors
        if link.source.path[-1] == link.target.path[-1] == "weight"
    }
    wrong: list[Link] = []
    for link in tensors:
        home, other = link.source.path[:-1], link.target.path[:-1]
        better = _role(link.target) in sources or _role(link.source) in targets
        worse = better or homes.get(home, other) != other or other in lamed
        if _is_half(link.source, link.target, halves) or (worse and _role(link.source) != _role(link.target)):
            wrong.append(link)
    scopes = [_decision(match, link).scope for link in wrong]
    places = set(map(_place, scopes))
    layers = {_place(scope) for scope in scopes if scope[0].path and scope[0].is_layer}
    places |= {_place(link.scope) for link in match.links if _place((link.source, link.target)) in layers}
    below = {link.source.path for link in match.links if link.why == ELIMINATED and _place(link.scope) in places}
    wrong += [
        link
        for link in tensors
        if link not in wrong
        and (
            (layers and _place(_decision(match, link).scope) in layers)
            or any(link.source.path[: len(path)] == path for path in below)
        )
    ]
    match.doubt(wrong, "its shape fits, but its name or the tensors beside it say otherwise")
    split = [
        bundle
        for bundle in match.bundles
        if any(_is_half(outer, inner, halves) for outer in bundle.outer for inner in bundle.inner)
    ]
    match.doubt_bundles(split, "its parts have names of another kind")


def _decision(match: Match, link: Link) -> Link:
    """The link that decided about a tensor: that of the modules around it, while they hold nothing else."""
    for other in match.links:
        if _place((other.source, other.target)) == _place(link.scope) and len(other.source.tensors) == 1:
            return _decision(match, other)
    return link


def _modules(leaves: Iterable[Node]) -> dict[Path, Path]:
    """For every layer, the innermost module around it that has another one."""
    homes = {leaf.path[:-1] for leaf in leaves}
    layers = Counter(home[:depth] for home in homes for depth in range(len(home)))
    return {
        home: next((home[:depth] for depth in range(len(home) - 1, 0, -1) if layers[home[:depth]] > 1), ())
        for home in homes
    }


def _is_apart(module: Path, others: Sequence[Path]) -> bool | None:
    """Whether none of ``others`` is around or within ``module``; unknown, if there are none."""
    return all(other[: len(module)] != module[: len(other)] for other in others) if others else None


def _place(pair: tuple[Node, Node]) -> tuple[Path, Path]:
    return pair[0].path, pair[1].path


def _is_half(source: Node, target: Node, halves: Container[tuple[Path, str]]) -> bool:
    """Whether ``source`` is called otherwise than ``target``, and has a twin that is left (``halves``)."""
    return source.path[-1] != target.path[-1] and (source.path[:-1], _first_word(source)) in halves


def _first_word(leaf: Node) -> str:
    return re.split(r"[_\d]", leaf.path[-1])[0]


def _letters(leaf: Node) -> frozenset[str]:
    return name_of(leaf.path[-3:]).words & {"q", "k", "v"}


def _is_spelled(leaf: Node) -> bool:
    """Whether its name is that of several projections in one."""
    return {"q", "k", "v"}.issuperset(parts := spelled_parts(name_of(leaf.path[-2:]))) and bool(parts)


def _role(leaf: Node) -> tuple[object, str]:
    """Its shape, and the last word of its key."""
    return squeeze(leaf.shape), re.split(r"[._]", leaf.key)[-1].lower()
