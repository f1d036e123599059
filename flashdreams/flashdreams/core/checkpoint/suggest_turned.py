"""Which matrices of a checkpoint are transposed, where their own shapes do not tell; what is unknown is left open."""

from __future__ import annotations

from collections import defaultdict

from flashdreams.core.checkpoint.suggest_fused import Bundle
from flashdreams.core.checkpoint.suggest_outcome import Link, Match
from flashdreams.core.checkpoint.suggest_tree import Node, squeeze
from flashdreams.core.checkpoint.suggest_words import template_of

Path = tuple[str, ...]


def judge_transposed(match: Match) -> None:
    """Where some matrices are transposed, so may be those whose shape does not show it: square ones, and two of
    opposite shapes. They are as all others of their block; where these are of both kinds, or do not show it either, or
    are left open, it is unknown. Modules outside lists tell nothing about each other, unless all are alike."""
    blocks: dict[str, list[Link]] = defaultdict(list)
    for link in match.tensors:
        if _is_matrix(link.source):
            blocks[block_of(link.target)].append(link)
    for bundle in match.bundles:
        blocks[block_of(bundle.inner[0])] += []  # even if nothing else in it is linked
    biases = {link.source.path[:-1]: link.source.shape for link in match.tensors if link.source.is_bias}
    matrices = [link for links in blocks.values() for link in links if not _is_square(link.source)]
    some, some_plain = any(map(_is_turned, matrices)), not all(map(_is_turned, matrices))
    blocks_of: dict[str, set[str]] = defaultdict(set)
    for link in match.tensors:
        blocks_of[block_of(link.source)].add(block_of(link.target))
    telling = [leaf for leaf in (*match.left, *match.lacking) if _is_matrix(leaf) and not _is_square(leaf)]
    lacking = {(block_of(leaf), squeeze(leaf.shape)[::-1]) for leaf in match.lacking if _is_matrix(leaf)}
    some |= any(
        (block, squeeze(leaf.shape)) in lacking
        for leaf in match.left
        if not _is_square(leaf)
        for block in (blocks_of[block_of(leaf)] if block_of(leaf) else [""])
    )
    left = {block for leaf in telling for block in (block_of(leaf), *blocks_of[block_of(leaf)])}
    fused = [bundle for bundle in match.bundles if _is_matrix(bundle.outer[0])]
    shown = {block_of(bundle.inner[0]) for bundle in fused if not _is_hidden(bundle)}
    before, match.turned = match.turned, set()
    for block, links in blocks.items():
        shapes = {squeeze(link.source.shape) for link in links}
        shapes |= {squeeze(leaf.shape) for leaf in match.lacking if block_of(leaf) == block}
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
        sure = bool(block) or not some_plain
        if turned and not plain and block not in left and sure:
            match.turned |= {link.source.key for link in hidden}
        elif turned or (untold and (some or block in left)) or (some and (block in left or not block)):
            match.doubt([*hidden, *unsure], "matrices around it are transposed or left open; its shape tells nothing")
        else:
            stale = [link for link in hidden if link.source.key in before]
            match.doubt(stale, "the transposed matrices around it are in doubt themselves")
            continue
        bundles = [bundle for bundle in match.bundles if _is_hidden(bundle) and block_of(bundle.inner[0]) == block]
        match.doubt_bundles(bundles, "its parts may be transposed")


def item_of(leaf: Node) -> Path:
    """The outermost list item that a tensor is in."""
    return leaf.path[: next((at for at, part in enumerate(leaf.path, start=1) if part.isdecimal()), 0)]


def block_of(leaf: Node) -> str:
    """:func:`item_of`, whatever the number."""
    return template_of(".".join(item_of(leaf)))


def _is_turned(link: Link) -> bool:
    return squeeze(link.source.shape) != squeeze(link.target.shape)


def _is_matrix(leaf: Node) -> bool:
    """Whether it has rows and columns, and no more (but axes of size 1)."""
    return len(squeeze(leaf.shape)) == 2 and squeeze(leaf.shape) == (leaf.shape or ())[:2]


def _is_square(leaf: Node) -> bool:
    return len(set(squeeze(leaf.shape))) == 1


def _is_hidden(bundle: Bundle) -> bool:
    """Whether the shapes do not tell if the checkpoint's tensors are transposed."""
    return _is_matrix(bundle.outer[0]) and any(map(_is_square, bundle.outer))
