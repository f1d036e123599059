"""What matching two trees of keys gives: links, fused tensors, and doubts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flashdreams.core.checkpoint.suggest_fused import Bundle
from flashdreams.core.checkpoint.suggest_tree import Node

SHAPE = "the only one of its shapes there"
"""Why a link was made, where nothing but shapes speaks for it."""


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

    @property
    def tensors(self) -> list[Link]:
        """The links of tensors, without those of modules."""
        return [link for link in self.links if link.source.shape is not None and link.target.shape is not None]

    @property
    def left(self) -> list[Node]:
        """The checkpoint's tensors that are in doubt."""
        return [leaf for doubt in self.doubts for node in doubt.sources for leaf in node.tensors]

    @property
    def lacking(self) -> list[Node]:
        """The model's tensors that are in doubt."""
        return [leaf for doubt in self.doubts for node in doubt.targets for leaf in node.tensors]

    def doubt(self, links: Iterable[Link], why: str) -> None:
        """Take ``links`` back."""
        for link in links:
            self.links.remove(link)
            self.doubts.append(Doubt([link.source], [link.target], why))

    def doubt_bundles(self, bundles: Iterable[Bundle], why: str) -> None:
        """Take ``bundles`` back."""
        for bundle in bundles:
            self.bundles.remove(bundle)
            self.doubts.append(Doubt([*bundle.outer], [*bundle.inner], why))
