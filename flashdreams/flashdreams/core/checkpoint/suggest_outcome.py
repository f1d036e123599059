"""What matching two trees of keys gives: links, fused tensors, doubts; and afterthoughts about transposed matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashdreams.core.checkpoint.suggest_fused import Bundle
from flashdreams.core.checkpoint.suggest_tree import Node, squeeze
from flashdreams.core.checkpoint.suggest_words import template_of


@dataclass(frozen=True)
class Link:
    """``source`` is ``target``; ``why``, and where (``scope``: the pair of modules in which it was decided)."""

    source: Node
    target: Node
    scope: tuple[Node, Node]
    why: str


@dataclass
class Doubt:
    """Nodes of which it is not known which is which (or that have no counterpart: one list is empty)."""

    sources: list[Node]
    targets: list[Node]
    why: str


@dataclass
class Match:
    """The outcome: links of modules and tensors, fused tensors, and what is open.

    ``turned`` are the checkpoint's square matrices that are to be transposed, as all others around them.
    """

    links: list[Link] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    turned: set[str] = field(default_factory=set)

    def judge_transposed(self) -> None:
        """Where some matrices of a block are transposed, so may be those whose shape does not show it: all square ones
        are, if all others are; else it is unknown, and they are no longer linked."""
        blocks: dict[str, list[Link]] = defaultdict(list)
        for link in self.links:
            if link.source.shape is not None and link.target.shape is not None and len(squeeze(link.source.shape)) == 2:
                blocks[_block(link.source)].append(link)
        for links in blocks.values():
            turned = [link for link in links if _is_turned(link)]
            if not turned:
                continue
            shapes = {squeeze(link.source.shape) for link in links}
            plain = [link for link in links if link not in turned and not _is_square(link)]
            hidden = [link for link in links if _is_square(link)]
            hidden += [link for link in plain if squeeze(link.source.shape)[::-1] in shapes]
            if plain:
                self._doubt(hidden, "matrices around it are transposed; whether it is, its shape does not tell")
            else:
                self.turned |= {link.source.key for link in hidden}

    def judge_leftovers(self) -> None:
        """A tensor is no longer linked if another one of its shape is left that has the better name: ``inv_freq`` is
        not the ``weight`` while a ``weight`` is left."""
        sources = {_role(leaf) for doubt in self.doubts for node in doubt.sources for leaf in node.tensors}
        targets = {_role(leaf) for doubt in self.doubts for node in doubt.targets for leaf in node.tensors}
        for link in list(self.links):
            first, second = link.source, link.target
            if first.shape is None or second.shape is None or first.path[-1] == second.path[-1]:
                continue
            if _role(second) in sources or _role(first) in targets:
                self._doubt([link], "another tensor of its shape is left, and has the better name")

    def _doubt(self, links: Iterable[Link], why: str) -> None:
        for link in links:
            self.links.remove(link)
            self.doubts.append(Doubt([link.source], [link.target], why))


def _role(leaf: Node) -> tuple[object, str]:
    return squeeze(leaf.shape), leaf.path[-1]


def _block(node: Node) -> str:
    """The outermost list item that a tensor is in, whatever the number."""
    last = next((at for at, part in enumerate(node.path) if part.isdecimal()), -1)
    return template_of(".".join(node.path[: last + 1]))


def _is_turned(link: Link) -> bool:
    return squeeze(link.source.shape) != squeeze(link.target.shape)


def _is_square(link: Link) -> bool:
    return len(set(squeeze(link.source.shape))) == 1
