"""What the whole says against links that looked right one by one: these are taken back, and left open."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

from flashdreams.core.checkpoint.suggest_fused import Bundle
from flashdreams.core.checkpoint.suggest_numbers import ELIMINATED
from flashdreams.core.checkpoint.suggest_outcome import Doubt, Link, Match
from flashdreams.core.checkpoint.suggest_tree import Node, squeeze, turn
from flashdreams.core.checkpoint.suggest_words import name_of, spelled_parts, template_of

Path = tuple[str, ...]


def judge(match: Match) -> None:
    """Take back what is contradicted, until nothing is: what one doubt leaves may speak against another link."""
    _judge_transposed(match)
    count = -1
    while count != (count := len(match.links) + len(match.bundles)):
        _judge_words(match)
        _judge_modules(match)
        _judge_leftovers(match)
        _judge_transposed(match)


def _judge_words(match: Match) -> None:
    """What is of queries, keys or values is so on both sides, in blocks where names say it on both; and what is called
    by all three is not another thing, while one of that name is left open."""
    said = {_block(link.target) for link in match.tensors if _letters(link.source) & _letters(link.target)}
    left = {squeeze(leaf.shape) for leaf in (*match.left, *match.lacking) if _is_spelled(leaf)}
    wrong = [
        link
        for link in match.tensors
        if (_block(link.target) in said and bool(_letters(link.source)) != bool(_letters(link.target)))
        or (squeeze(link.target.shape) in left and _is_spelled(link.source) != _is_spelled(link.target))
    ]
    _doubt(match, wrong, "its shape fits, but of the two names just one is of a query, key or value")


def _judge_transposed(match: Match) -> None:
    """Where some matrices are transposed, so may be those whose shape does not show it: square ones, and two of
    opposite shapes. They are as all others of their block; where these are of both kinds, or do not show it either, or
    are left open, it is unknown."""
    blocks: dict[str, list[Link]] = defaultdict(list)
    for link in match.tensors:
        if _is_matrix(link.source):
            blocks[_block(link.target)].append(link)
    for bundle in match.bundles:
        blocks[_block(bundle.inner[0])] += []  # even if nothing else in it is linked
    biases = {link.source.path[:-1]: link.source.shape for link in match.tensors if link.source.is_bias}
    matrices = [link for links in blocks.values() for link in links if not _is_square(link.source)]
    some, some_plain = any(map(_is_turned, matrices)), not all(map(_is_turned, matrices))
    blocks_of: dict[str, set[str]] = defaultdict(set)
    for link in match.tensors:
        blocks_of[_block(link.source)].add(_block(link.target))
    telling = [leaf for leaf in (*match.left, *match.lacking) if _is_matrix(leaf) and not _is_square(leaf)]
    left = {block for leaf in telling for block in (_block(leaf), *blocks_of[_block(leaf)])}
    fused = [bundle for bundle in match.bundles if _is_matrix(bundle.outer[0])]
    shown = {_block(bundle.inner[0]) for bundle in fused if not _is_hidden(bundle)}
    before, match.turned = match.turned, set()
    for block, links in blocks.items():
        shapes = {squeeze(link.source.shape) for link in links}
        shapes |= {squeeze(leaf.shape) for leaf in match.lacking if _block(leaf) == block}
        turned = [link for link in links if _is_turned(link)]
        plain = [link for link in links if not _is_turned(link) and not _is_square(link.source)]
        hidden = [link for link in links if _is_square(link.source)]
        unsure = [
            link
            for link in plain
            if squeeze(link.source.shape)[::-1] in shapes
            and biases.get(link.source.path[:-1]) != squeeze(link.source.shape)[:1]
        ]
        untold = not turned and len(plain) == len(unsure) and block not in shown
        sure = bool(block) or not some_plain  # modules outside lists have nothing to do with each other
        if turned and not plain and block not in left and sure:
            match.turned |= {link.source.key for link in hidden}
        elif turned or (untold and (some or block in left)):
            _doubt(match, [*hidden, *unsure], "matrices around it are transposed or left open; its shape tells nothing")
        else:
            stale = [link for link in hidden if link.source.key in before]
            _doubt(match, stale, "the transposed matrices around it are in doubt themselves")
            continue
        bundles = [bundle for bundle in match.bundles if _is_hidden(bundle) and _block(bundle.inner[0]) == block]
        _doubt_bundles(match, bundles, "its parts may be transposed")


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
            found = [leaf.path[:-2] for leaf in beside if _item(leaf) == _item(pair[there])]
            apart.append(_is_apart(pair[there].path[:-2], found))
            if apart[side] is None and module not in open_modules[side]:
                apart[side] = False
        if alone or (any(apart) and False not in apart):
            crossed.append(link)
    _doubt(match, crossed, "its shape fits, but what is beside it in the two modules belongs to others")


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
    _doubt(match, wrong, "its shape fits, but its name or the tensors beside it say otherwise")
    split = [
        bundle
        for bundle in match.bundles
        if any(_is_half(outer, inner, halves) for outer in bundle.outer for inner in bundle.inner)
    ]
    _doubt_bundles(match, split, "its parts have names of another kind")


def _decision(match: Match, link: Link) -> Link:
    """The link that decided about a tensor: that of the modules around it, while they hold nothing else."""
    for other in match.links:
        if _place((other.source, other.target)) == _place(link.scope) and len(other.source.tensors) == 1:
            return _decision(match, other)
    return link


def _doubt(match: Match, links: Iterable[Link], why: str) -> None:
    for link in links:
        match.links.remove(link)
        match.doubts.append(Doubt([link.source], [link.target], why))


def _doubt_bundles(match: Match, bundles: Iterable[Bundle], why: str) -> None:
    for bundle in bundles:
        match.bundles.remove(bundle)
        match.doubts.append(Doubt([*bundle.outer], [*bundle.inner], why))


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


def _item(leaf: Node) -> Path:
    """The outermost list item that a tensor is in."""
    return leaf.path[: next((at for at, part in enumerate(leaf.path, start=1) if part.isdecimal()), 0)]


def _block(leaf: Node) -> str:
    """:func:`_item`, whatever the number."""
    return template_of(".".join(_item(leaf)))


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


def _is_turned(link: Link) -> bool:
    return squeeze(link.source.shape) != squeeze(link.target.shape)


def _is_matrix(leaf: Node) -> bool:
    """Whether it has rows and columns, and no more (but axes of size 1)."""
    return len(squeeze(leaf.shape)) == 2 and squeeze(leaf.shape) == (leaf.shape or ())[:2]


def _is_square(leaf: Node) -> bool:
    return len(set(squeeze(leaf.shape))) == 1


def _is_hidden(bundle: Bundle) -> bool:
    """Whether the shapes do not tell if the checkpoint's tensors are transposed."""
    return not bundle.whole_is_source and _is_matrix(bundle.outer[0]) and any(map(_is_square, bundle.outer))
