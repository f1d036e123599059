"""Keys of a checkpoint as a tree, and two forests brought to where their nodes hold alike tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from flashdreams.core.checkpoint.keymap_tensors import Shape, shape_of
from flashdreams.core.checkpoint.suggest_words import name_of, template_of


@dataclass(eq=False)
class Node:
    """A module (its ``children``) or a tensor (its ``shape`` and ``key``); ``path`` is the way from the root."""

    path: tuple[str, ...]
    order: int
    key: str = ""
    shape: Shape | None = None
    children: dict[str, Node] = field(default_factory=dict)
    parent: Node | None = field(default=None, repr=False)

    @cached_property
    def place(self) -> tuple[Any, ...]:
        """The path without the numbers of things that are named alike within: the same for every block of a list."""
        if self.parent is None:
            return ()
        part = template_of(self.path[-1])
        within = frozenset(leaf.below(self) for leaf in self.tensors) if part != self.path[-1] else None
        return (*self.parent.place, part, within)

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

    @cached_property
    def row(self) -> frozenset[str]:
        """The names beside this, and its own, that differ by numbers only."""
        template = template_of(self.path[-1])
        beside = self.parent.children if self.parent else self.path[-1:]
        return frozenset(part for part in beside if template_of(part) == template)

    @cached_property
    def items(self) -> list[Node]:
        """The items in order, if this is a list of modules, or a module around nothing but one."""
        children = list(self.children.values())
        if len(children) == 1:
            return children[0].items
        is_list = len(children) > 1 and all(part.isdecimal() for part in self.children)
        return sorted(children, key=lambda child: int(child.path[-1])) if is_list else []


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
                node.children[""] = Node((*node.path, ""), node.order, node.key, node.shape, parent=node)
                node.key, node.shape = "", None
            node = node.children.setdefault(part, Node(tuple(path[:depth]), order, parent=node))
        if node.children:
            node.children[""] = Node((*node.path, ""), order, parent=node)
            node = node.children[""]
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
        length = len(node.items) if len(node.tensors) == size else 0
        found = [_lists(nodes, length) for nodes in (left, right)]
        if length and len(found[0]) == len(found[1]) == 1:
            [source], [target] = found
            if any(source is one for one in left) and any(target is one for one in right) and _alike(source, target):
                return [Group([source], [target], "list")]
    return []


def _lists(nodes: Iterable[Node], length: int) -> list[Node]:
    """The lists of so many items among ``nodes``, and those that were opened, of which items are among them."""
    around = [node.parent if node.parent and node.path[-1].isdecimal() else node for node in nodes]
    return list({id(node): node for node in (*nodes, *around) if len(node.items) == length}.values())


def _alike(first: Node, second: Node) -> bool:
    one, two = (Counter(squeeze(leaf.shape) for leaf in node.tensors) for node in (first, second))
    return 4 * (one & two).total() >= 3 * max(one.total(), two.total())


def are_alike(firsts: Sequence[Node], seconds: Sequence[Node]) -> bool:
    """Whether no two items of the one list would be more like those of the other, if they changed places."""

    @cache
    def likeness(one: tuple[Any, ...], two: tuple[Any, ...]) -> float:
        counts = Counter(dict(one)), Counter(dict(two))
        return 2 * (counts[0] & counts[1]).total() / max(1, counts[0].total() + counts[1].total())

    pairs = {(first.turned, second.turned) for first, second in zip(firsts, seconds, strict=True)}
    return all(
        likeness(*one) + likeness(*two) >= likeness(one[0], two[1]) + likeness(two[0], one[1])
        for one in pairs
        for two in pairs
    )
