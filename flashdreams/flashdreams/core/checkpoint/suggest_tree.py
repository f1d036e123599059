"""Keys of a checkpoint as a tree, and two forests brought to where their nodes hold alike tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashdreams.core.checkpoint.keymap_tensors import Shape, shape_of
from flashdreams.core.checkpoint.suggest_words import name_of


@dataclass(eq=False)
class Node:
    """A module (its ``children``) or a tensor (its ``shape`` and ``key``); ``path`` is the way from the root."""

    path: tuple[str, ...]
    order: int
    key: str = ""
    shape: Shape | None = None
    children: dict[str, Node] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[Node, ...]:
        """The tensors below, or this one."""
        if self.shape is not None:
            return (self,)
        return tuple(tensor for child in self.children.values() for tensor in child.tensors)

    def below(self, scope: Node) -> tuple[str, ...]:
        """The path from ``scope`` to here."""
        return self.path[len(scope.path) :]

    @cached_property
    def is_bias(self) -> bool:
        """Whether this, a tensor, is called a bias."""
        return "bias" in name_of(self.path[-1:]).words

    @cached_property
    def is_layer(self) -> bool:
        """Whether all tensors below belong to one module."""
        return len({leaf.path[:-1] for leaf in self.tensors}) == 1

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """Shapes below, as a multiset that takes no notice of names, order or nesting."""
        return tuple(sorted(Counter((leaf.is_bias, squeeze(leaf.shape)) for leaf in self.tensors).items()))

    @cached_property
    def mass(self) -> tuple[Any, ...]:
        """:attr:`content` that also takes no notice of fused and unfused projections: rows add up."""
        rows: Counter[tuple[bool, Shape]] = Counter()
        for leaf in self.tensors:
            shape = squeeze(leaf.shape)
            rows[leaf.is_bias, shape[1:]] += shape[0] if shape else 1
        return tuple(sorted(rows.items()))

    @cached_property
    def turned(self) -> tuple[Any, ...]:
        """:attr:`content` that also takes no notice of transposed matrices."""
        return tuple(sorted(Counter(turn(leaf.shape) for leaf in self.tensors).items()))

    def list_length(self) -> int:
        """How many items this has, if it is a list of modules; else 0."""
        is_list = len(self.children) > 1 and all(part.isdecimal() for part in self.children)
        return len(self.children) if is_list else 0


def squeeze(shape: Shape | None) -> Shape:
    return tuple(size for size in shape or () if size != 1)


def turn(shape: Shape | None) -> Shape:
    """The same for a matrix and its transpose."""
    flat = squeeze(shape)
    return tuple(sorted(flat)) if len(flat) == 2 else flat


def build_tree(header: Mapping[str, Any]) -> Node:
    """The root of the tree of ``header``'s keys (parts between dots)."""
    root = Node((), 0)
    for order, (key, value) in enumerate(header.items()):
        node, path = root, key.split(".")
        for depth, part in enumerate(path, start=1):
            if node.shape is not None:  # a tensor that also has parts below its name
                node.children[""] = Node((*node.path, ""), node.order, node.key, node.shape)
                node.key, node.shape = "", None
            node = node.children.setdefault(part, Node(tuple(path[:depth]), order))
        if node.children:
            node = node.children[""] = Node((*node.path, ""), order)
        node.key, node.shape = key, shape_of(value)
    return root


@dataclass
class Group:
    """Nodes that hold alike tensors, as many on each side: each of one side is one of the other."""

    sources: list[Node]
    targets: list[Node]
    how: str


@dataclass
class Alignment:
    """Two forests, grouped; ``extra`` and ``missing`` are tensors left on the source's and the target's side."""

    groups: list[Group]
    extra: list[Node]
    missing: list[Node]


Settle = Callable[[list[Node], list[Node]], list[tuple[Node, Node]]]
_KINDS: tuple[tuple[str, Callable[[Node], Any]], ...] = (
    ("content", lambda node: node.content),
    ("mass", lambda node: node.mass if len(node.tensors) > 1 else None),
    ("turned", lambda node: node.turned if len(node.tensors) > 1 else None),
)


def align(sources: Iterable[Node], targets: Iterable[Node], settle: Settle) -> Alignment:
    """Open the largest nodes that have no counterpart, until all have one or only tensors are left.

    Args:
        settle: pairs those of some source and target nodes of one content, unlike in number, that it is sure of.
    """
    left, right = list(sources), list(targets)
    sure: list[Group] = []
    while True:
        groups, left_open, right_open = _balance(left, right)
        largest = max((len(node.tensors) for node in (*left_open, *right_open) if node.shape is None), default=0)
        if not largest:
            return Alignment([*sure, *groups], left_open, right_open)
        settled = _settle_unequal(left_open, right_open, largest, settle)
        if settled:
            sure += [Group([source], [target], "settled") for source, target in settled]
            gone = {id(node) for pair in settled for node in pair}
            left = [node for node in left if id(node) not in gone]
            right = [node for node in right if id(node) not in gone]
            continue
        pairs = _pair_lists(left_open, right_open, largest)
        if pairs:
            sure += pairs
            gone = {id(node) for group in pairs for node in (*group.sources, *group.targets)}
            left = [node for node in left if id(node) not in gone]
            right = [node for node in right if id(node) not in gone]
            continue
        opened = {id(node) for node in (*left_open, *right_open) if len(node.tensors) == largest and not node.shape}
        left, right = _open(left, opened), _open(right, opened)


def _open(nodes: list[Node], opened: set[int]) -> list[Node]:
    """``nodes`` with the children of those ``opened`` in their place; a module around one other is opened with it, so
    that what is opened together stays comparable."""
    result: list[Node] = []
    for node in nodes:
        if id(node) not in opened or node.shape is not None:
            result.append(node)
            continue
        children = list(node.children.values())
        while len(children) == 1 and children[0].shape is None:
            children = list(children[0].children.values())
        result.extend(children)
    return result


def _balance(left: list[Node], right: list[Node]) -> tuple[list[Group], list[Node], list[Node]]:
    groups: list[Group] = []
    for how, look in _KINDS:
        buckets: dict[Any, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
        for side, nodes in enumerate((left, right)):
            for node in nodes:
                buckets[look(node)][side].append(node)
        taken: set[int] = set()
        for look_alike, (sources, targets) in buckets.items():
            if look_alike is not None and len(sources) == len(targets):
                groups.append(Group(sources, targets, how))
                taken |= {id(node) for node in (*sources, *targets)}
        left = [node for node in left if id(node) not in taken]
        right = [node for node in right if id(node) not in taken]
    return groups, left, right


def _settle_unequal(left: list[Node], right: list[Node], size: int, settle: Settle) -> list[tuple[Node, Node]]:
    buckets: dict[Any, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
    for side, nodes in enumerate((left, right)):
        for node in nodes:
            if len(node.tensors) == size and node.shape is None:
                buckets[node.content][side].append(node)
    return [pair for sources, targets in buckets.values() if sources and targets for pair in settle(sources, targets)]


def _pair_lists(left: list[Node], right: list[Node], size: int) -> list[Group]:
    """Lists of as many, mostly alike items, where there is one such list on each side."""
    for node in (*left, *right):
        length = node.list_length() if len(node.tensors) == size else 0
        sources = [other for other in left if length and other.list_length() == length]
        targets = [other for other in right if length and other.list_length() == length]
        if len(sources) == len(targets) == 1 and _alike(sources[0], targets[0]):
            return [Group(sources, targets, "list")]
    return []


def _alike(first: Node, second: Node) -> bool:
    one, two = (Counter(squeeze(leaf.shape) for leaf in node.tensors) for node in (first, second))
    return 4 * (one & two).total() >= 3 * max(one.total(), two.total())
