"""Links that shapes alone speak for, held against what is around them: each needs evidence that nothing else fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence

from flashdreams.core.checkpoint.keymap_tensors import Shape
from flashdreams.core.checkpoint.suggest_numbers import ELIMINATED
from flashdreams.core.checkpoint.suggest_outcome import SHAPE, Link, Match
from flashdreams.core.checkpoint.suggest_tree import squeeze, turn
from flashdreams.core.checkpoint.suggest_words import GENERAL, name_of

Path = tuple[str, ...]
Look = Callable[[Shape | None], Shape]


def unsupported(match: Match) -> list[Link]:
    """Links of tensors that rest on one of modules (or tensors) which have no word in common, although

    - tensors around them are open on both sides, and others there, open or not, have the same shapes; or
    - one of two layers is an item of a list, whose other items all are in a module that the other one is not in.
    """
    above = {(link.source.path, link.target.path): link for link in match.links}
    in_scope: dict[tuple[Path, Path], list[Link]] = defaultdict(list)
    for link in match.links:
        in_scope[_place(link)].append(link)
    is_open = {leaf.path for leaf in match.left}, {leaf.path for leaf in match.lacking}
    is_turned = any(squeeze(link.source.shape) != squeeze(link.target.shape) for link in match.tensors)
    look = turn if is_turned else squeeze  # where nothing is transposed, a matrix is no rival to its transpose
    failed: set[int] = set()
    for links in in_scope.values():
        weak = [link for link in links if _is_weak(link)]
        around = _around(links, is_open, look) if weak else []
        failed |= {
            id(link)
            for link in weak
            if _has_rivals(link, around, look) or (link.source.is_layer and _strays(link, links))
        }

    def rests_on_one(link: Link | None) -> bool:
        while link is not None and id(link) not in failed:
            link = above.get(_place(link))
        return link is not None

    return [link for link in match.tensors if rests_on_one(link)]


def _place(link: Link) -> tuple[Path, Path]:
    return link.scope[0].path, link.scope[1].path


def _is_weak(link: Link) -> bool:
    if link.why not in (SHAPE, ELIMINATED):
        return False
    first, second = name_of(link.source.below(link.scope[0])), name_of(link.target.below(link.scope[1]))
    same = first.text == second.text and not first.text.isdecimal()
    return not same and not (first.telling & second.telling) - GENERAL


def _around(links: Sequence[Link], is_open: Sequence[Container[Path]], look: Look) -> list[Counter[Shape]]:
    """The shapes on each side of the scope of ``links``, without modules that have a counterpart; none, if all else
    that is there on one side has one."""
    found: list[Counter[Shape]] = []
    for side, scope in enumerate(links[0].scope):
        modules = {(link.source, link.target)[side].path for link in links if not link.source.is_layer}
        free = [
            leaf for leaf in scope.tensors if not any(leaf.path[:depth] in modules for depth in range(len(leaf.path)))
        ]
        if all(leaf.path not in is_open[side] for leaf in free):
            return []
        found.append(Counter(look(leaf.shape) for leaf in free))
    return found


def _has_rivals(link: Link, around: Iterable[Counter[Shape]], look: Look) -> bool:
    own = Counter(look(leaf.shape) for leaf in link.source.tensors)
    return any(own + (own if link.source.is_layer else Counter()) <= shapes for shapes in around)


def _strays(link: Link, links: Sequence[Link]) -> bool:
    ends = link.source, link.target
    for own, other, side in ((*ends, 0), (*ends[::-1], 1)):
        pairs = [(one.source, one.target)[:: 1 - 2 * side] for one in links if one is not link]
        homes = [there.path[:-1] for here, there in pairs if here.path[:-1] == own.path[:-1]]
        home = _common(homes)
        inner = len(home) > len(link.scope[1 - side].path)
        if own.path[-1].isdecimal() and inner and other.path[: len(home)] != home:
            return True
    return False


def _common(paths: Sequence[Path]) -> Path:
    """The module that all are in."""
    depth = 0
    while paths and all(len(path) > depth and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return paths[0][:depth] if paths else ()
