"""Alike things told apart by the numbers in their names: ``conv1``, ``conv2`` are layers 2 and 6 of a list.

A number is believed where it is an index in a list, or where it counts off, without a gap, all things of that name.
The numbers of one side may also count what words say on the other: self-attention comes before cross-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from flashdreams.core.checkpoint.suggest_words import ENDS, SEQUENCES, Name, template_of

Pair = tuple[int, int, str]  # index of the source, index of the target, why
ELIMINATED = "the only ones left"
"""Why a pair was made, where nothing but the absence of others speaks for it."""
RANKED = "the order of the numbers"


@dataclass(frozen=True)
class Context:
    """What is known beside the names.

    Attributes:
        order: the targets in the order in which the model registers them (the rank of each), where that is known.
        stack: whether the things are (nearly) all there is in their place: a list, not parts of a block.
        torn: whether things beside these have no counterpart, on both sides: then alike things may not belong together.
        learnt: which number a word of the one side was found to be on the other (``self`` -> 1), elsewhere here.
        others: the names beside these (of the target's side, if true) that differ from them by a number only, each with
            its counterpart, where that is known.
    """

    order: Sequence[int] | None = None
    stack: bool = False
    torn: bool = False
    learnt: Mapping[str, int] = field(default_factory=dict)
    others: Callable[[bool, Sequence[Name]], list[tuple[Name, Name | None]]] = lambda is_target, names: []


@dataclass(frozen=True)
class Side:
    """The things of one side that are to be told apart: indices into ``names``, and the words each has alone."""

    indices: list[int]
    names: Sequence[Name]
    telling: Mapping[int, frozenset[str]]
    is_target: bool

    @property
    def is_numbered(self) -> bool:
        """Whether they differ by numbers alone."""
        numbers = {self.names[index].numbers for index in self.indices}
        same_length = len({len(found) for found in numbers}) == 1
        return not any(self.telling.values()) and same_length and len(numbers) == len(self.indices)

    @property
    def ranked(self) -> list[int]:
        """The indices in the order of their numbers."""
        return sorted(self.indices, key=lambda index: self.names[index].numbers)

    @property
    def in_list(self) -> bool:
        return all(self.names[index].is_index for index in self.indices)


def by_numbers(left: Side, right: Side, context: Context) -> list[Pair]:
    """Pairs by rank, where things differ by numbers alone on one side or on both; none where that may be wrong."""
    if context.torn:
        return []
    if left.is_numbered and right.is_numbered:
        return _both_numbered(left, right, context)
    if left.is_numbered and any(right.telling.values()):
        return [(index, other, why) for index, other, why in _counted_words(left, right, context)]
    if right.is_numbered and any(left.telling.values()):
        return [(other, index, why) for index, other, why in _counted_words(right, left, context)]
    return []


def _both_numbered(left: Side, right: Side, context: Context) -> list[Pair]:
    if _is_built_otherwise(right, context):
        return []  # which of the two orders the other side follows is unknown
    pairs = list(zip(left.ranked, right.ranked, strict=True))
    ours, theirs = ([side.names[index] for index in side.ranked] for side in (left, right))
    if not _same_axes(ours, theirs):
        return []
    same = all(one.numbers == two.numbers for one, two in zip(ours, theirs, strict=True))
    if (
        left.in_list
        and right.in_list
        and not same
        and _indices(ours, False, context) == _indices(theirs, True, context)
    ):
        return []  # two lists with the same places, yet the things that look alike are at other ones
    if not (same and (left.in_list or right.in_list)):
        if len(pairs) > 2 and not (left.in_list or right.in_list or context.stack or context.order is not None):
            return []
        for side, own, partners in ((left, ours, theirs), (right, theirs, ours)):
            if not side.in_list and not _is_one_row(own, partners, context.others(side.is_target, own)):
                return []
    return [(index, other, RANKED) for index, other in pairs]


def _same_axes(ours: Sequence[Name], theirs: Sequence[Name]) -> bool:
    """Whether it is clear which numbers count the same, where several differ: by how many of each there are."""
    first, second = _axes(ours), _axes(theirs)
    if min(len(first), len(second)) < 2:
        return True
    return first == second and len(set(first)) == len(first) and prod(first) == len(ours)


def _axes(names: Sequence[Name]) -> list[int]:
    """How many values each of the numbers has that differ at all."""
    return [count for column in zip(*(name.numbers for name in names), strict=True) if (count := len({*column})) > 1]


def _indices(names: Sequence[Name], is_target: bool, context: Context) -> set[tuple[int, ...]]:
    return {name.numbers for name in (*names, *(name for name, _ in context.others(is_target, names)))}


def _is_built_otherwise(side: Side, context: Context) -> bool:
    """Whether numbered targets are registered in another order than that of their numbers."""
    if context.order is None or side.in_list or not side.is_target:
        return False
    return sorted(side.indices, key=context.order.__getitem__) != side.ranked


def _is_one_row(own: Sequence[Name], partners: Sequence[Name], others: Sequence[tuple[Name, Name | None]]) -> bool:
    """Whether ``own`` are, with ``others`` whose counterparts are known, counted off in the order of ``partners``."""
    templates = {template_of(name.text) for name in partners}
    known = [(name, other) for name, other in others if other and template_of(other.text) in templates]
    row = sorted([*zip(own, partners, strict=True), *known], key=lambda pair: pair[0].numbers)
    follows = [other.numbers for _, other in row]
    return len(known) == len(others) and _counts(own, others) and follows == sorted(follows)


def _varying(names: Sequence[Name]) -> int:
    """Which of their numbers the names differ in first."""
    return next(at for at in range(len(names[0].numbers)) if len({name.numbers[at] for name in names}) > 1)


def _counts(names: Sequence[Name], others: Sequence[tuple[Name, Name | None]]) -> bool:
    """Whether the numbers are 1, 2, ... or 0, 1, ..., all things of that name taken together."""
    at = _varying(names)
    row = [*names, *(name for name, _ in others)]
    if any(len(name.numbers) != len(names[0].numbers) for name in row):
        return False
    values = sorted(name.numbers[at] for name in row)
    fixed = {(*name.numbers[:at], *name.numbers[at + 1 :]) for name in row}
    return len(fixed) == 1 and values in (list(range(len(row))), list(range(1, len(row) + 1)))


def _counted_words(numbered: Side, worded: Side, context: Context) -> list[Pair]:
    """What the numbers of one side count on the other: a sequence every network has, one learnt here, or the order of
    registration where the numbers in the names agree with it. All that have an opinion must agree."""
    own = [numbered.names[index] for index in numbered.ranked]
    others = context.others(numbered.is_target, own)
    if len(_axes(own)) > 1:
        return []  # which of the numbers counts what the words tell, is unknown
    if _is_built_otherwise(numbered, context) or not (numbered.in_list or (_counts(own, others) and not others)):
        return []
    opinions = [
        (order, " < ".join(chain)) for chain in SEQUENCES if (order := _in_sequence(chain, own, worded, others))
    ]
    learnt = _learnt_order(own, worded, context)
    if learnt:
        opinions.append((learnt, "as elsewhere in the block"))
    elif numbered.is_target and len(own) > 2 and context.order is None and not numbered.in_list:
        return []  # the model may count its norms in another order than it runs them
    if worded.is_target and context.order is not None:
        registered = sorted(worded.indices, key=context.order.__getitem__)
        values = [(name.numbers[_varying(own)],) for name in own]
        if opinions or [worded.names[index].numbers[-1:] for index in registered] == values:
            opinions.append((registered, "the order of registration"))
    if not opinions or any(order != opinions[0][0] for order, _ in opinions):
        return []
    why = "; ".join(why for _, why in opinions)
    return [(index, other, why) for index, other in zip(numbered.ranked, opinions[0][0], strict=True)]


def _in_sequence(
    chain: Sequence[str], own: Sequence[Name], worded: Side, others: Sequence[tuple[Name, Name | None]]
) -> list[int] | None:
    """``worded`` in the order of ``chain``, if each is one of it and the things beside them agree."""
    places = {index: _place(chain, worded.telling[index]) for index in worded.indices}
    if None in places.values() or len(set(places.values())) < len(places):
        return None
    order = sorted(worded.indices, key=lambda index: places[index] or 0)
    beside = [(name.numbers, place) for name, other in others if other and (place := _place(chain, other.telling))]
    row = sorted([*((name.numbers, places[index]) for name, index in zip(own, order, strict=True)), *beside])
    follows = [place for _, place in row]
    return order if follows == sorted(follows, key=lambda place: place or 0) else None


def _place(chain: Sequence[str], words: frozenset[str]) -> int | None:
    """Which of ``chain`` the words name; none if they put the thing after another one."""
    found = [at for at, word in enumerate(chain) if word in words]
    if len(found) != 1 or (words & ENDS and len(words) > 1 and "in" not in chain):
        return None
    return found[0] if not words & ENDS or chain[found[0]] in ENDS else None


def _learnt_order(own: Sequence[Name], worded: Side, context: Context) -> list[int] | None:
    values = [name.numbers[_varying(own)] for name in own]
    placed: dict[int, int] = {}
    for index in worded.indices:
        said = {context.learnt[word] for word in worded.telling[index] if word in context.learnt}
        if len(said) == 1 and said <= set(values):
            placed.setdefault(values.index(said.pop()), index)
    rest = [index for index in worded.indices if index not in placed.values()]
    if len(placed) < len(own) - 1 or len(placed) + len(rest) != len(own):
        return None
    return [placed[rank] if rank in placed else rest.pop() for rank in range(len(own))]
