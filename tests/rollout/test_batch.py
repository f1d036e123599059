"""Records of many samples: what picking and joining keep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.rollout.batch import CONCAT, EACH, Batch, Packed

pytestmark = pytest.mark.ci_cpu


@dataclass(eq=False)
class Inner(Batch):
    values: torch.Tensor = field(metadata=CONCAT)
    number: int = 0


@dataclass(eq=False)
class Record(Batch):
    name: str
    rows: torch.Tensor = field(metadata=CONCAT)
    ids: list[str] = field(metadata=CONCAT)
    slots: dict[str, torch.Tensor] = field(metadata=CONCAT)
    ragged: Packed = field(metadata=CONCAT)
    inner: Inner = field(metadata=CONCAT)
    parts: list[Inner] = field(metadata=EACH)
    absent: torch.Tensor | None = field(metadata=CONCAT, default=None)


def record(count: int, name: str = "a", first: int = 0) -> Record:
    """Sample ``i`` is recognised everywhere: its number stands in every field."""
    numbers = torch.arange(first, first + count)
    rows = numbers[:, None] * torch.ones(1, 3)
    return Record(
        name, rows, [str(i) for i in numbers.tolist()], {"text": rows[:, :2]},
        Packed.of([torch.full((1 + i % 3,), i) for i in numbers.tolist()]),
        Inner(rows), [Inner(rows + 100 * k, k) for k in range(2)],
    )  # fmt: skip


def numbers(batch: Record) -> list[int]:
    """Which samples these are; an error where two fields disagree."""
    found = [int(row[0]) for row in batch.rows]
    assert batch.ids == [str(i) for i in found]
    assert [int(row[0]) for row in batch.slots["text"]] == found
    assert [row.tolist() for row in batch.ragged.unpack()] == [[i] * (1 + i % 3) for i in found]
    assert [int(row[0]) for row in batch.inner.values] == found
    assert [[int(row[0]) for row in part.values] for part in batch.parts] == [
        [i + 100 * k for i in found] for k in (0, 1)
    ]
    assert batch.absent is None
    return found


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_what_is_joined_can_be_taken_apart_again(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    joined = Record.concat([record(size, first=start) for size, start in zip(sizes, starts, strict=True)])
    assert numbers(joined) == list(range(sum(sizes)))
    for size, start in zip(sizes, starts, strict=True):
        assert numbers(joined.slice(start, start + size)) == list(range(start, start + size))


@given(st.integers(1, 5), st.data())
def test_selecting_is_indexing(size, data):
    picked = data.draw(st.lists(st.integers(-size, size - 1), max_size=6))
    selected = record(size).select(picked)
    assert numbers(selected) == [index % size for index in picked]
    assert torch.equal(record(size).select(torch.tensor(picked, dtype=torch.long)).rows, selected.rows)


@given(st.integers(1, 3), st.integers(1, 3))
def test_repeating_and_cutting_undo_each_other(size, count):
    repeated = record(size).repeat_interleave(count)
    assert numbers(repeated) == [i for i in range(size) for _ in range(count)]
    assert [numbers(part) for part in repeated.chunk(size)] == [[i] * count for i in range(size)]


def test_a_slice_shares_no_memory_with_its_source():
    whole = record(3)
    whole.slice(0, 2).rows.zero_()
    assert numbers(whole) == [0, 1, 2]


def test_one_item_is_handed_back_as_it_is():
    only = record(2)
    assert Record.concat([only]) is only


def test_map_reaches_every_tensor_of_a_sample():
    moved = record(2).map(lambda tensor: tensor + 1)
    assert moved.parts[1].values[0, 0] == 101
    assert moved.ragged.values.tolist() == [1, 2, 2]
    assert moved.ids == ["0", "1"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "nothing was given"),
        ([record(1), record(1, name="b")], "Record.name differs"),
        ([record(1), replace(record(1), rows=torch.zeros(1, 4))], r"rows has shapes \[\[1, 3\], \[1, 4\]\]"),
        ([record(1), replace(record(1), absent=torch.zeros(1))], "absent is of several kinds"),
        ([record(1), replace(record(1), parts=record(1).parts[:1])], "parts has 2 and 1 entries"),
        ([record(1), replace(record(1), slots={})], "slots has other entries"),
    ],
)
def test_what_does_not_fit_together_is_named(items, message):
    with pytest.raises(ValueError, match=message):
        Record.concat(items)


def test_samples_that_cannot_be_counted_or_dealt_are_refused():
    with pytest.raises(ValueError, match="rows: 2.*ids: 1"):
        replace(record(2), ids=["0"]).batch_size  # noqa: B018 (raises)
    with pytest.raises(ValueError, match="3 samples cannot be cut into 2"):
        record(3).chunk(2)
    with pytest.raises(IndexError, match="sample 3 was asked of 3"):
        record(3).select([3])
    with pytest.raises(ValueError, match="count is 0"):
        record(3).repeat_interleave(0)


def test_packing_takes_a_list_and_lengths_that_add_up():
    with pytest.raises(TypeError, match="list of one tensor per sample"):
        Packed.of(torch.zeros(3, 2))  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match="do not add up to the 3 rows"):
        Packed(torch.zeros(3), (1, 1))
