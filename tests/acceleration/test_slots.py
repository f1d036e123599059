"""Slots: one rollout after another in the same memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.acceleration.slots import Slot, SlotPool
from flashdreams.core import notices
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache

pytestmark = pytest.mark.ci_cpu


@dataclass(frozen=True)
class Text:
    k: Tensor
    v: Tensor


@dataclass
class Block:
    kv: RollingKVCache
    text: Text
    picture: Tensor | None = None
    state: Any = None


@dataclass
class Cache:
    """As transformers keep it: what passes are given in ``branches``, and facts and derived values beside it."""

    branches: list[list[Block]]
    given: Tensor
    start: int = 0
    derived: Any = field(default=None, metadata={"derived": True})


def make(text: float = 1.0, *, window: int = 4, picture: Tensor | None = None, given: Tensor | None = None) -> Cache:
    geometry = CacheGeometry(window, 1, 3, relative=True)
    kv = [RollingKVCache(geometry, 1, 2, 4, torch.float32, "cpu") for _ in range(2)]
    blocks = [Block(each, Text(torch.full((2,), text), torch.full((3,), text)), picture) for each in kv]
    return Cache([blocks], torch.zeros(1) if given is None else given)


def tensors(cache: Cache) -> list[Tensor]:
    """What passes read and write."""
    found = []
    for block in cache.branches[0]:
        assert block.kv.raw_sink is not None
        found += [block.kv.k, block.kv.v, block.kv.raw_sink, block.text.k, block.text.v]
        found += [] if block.picture is None else [block.picture]
    return found


def addresses(cache: Cache) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(cache)]


class Discarded(list[Slot]):
    """The slots whose graphs were given up."""

    def __call__(self, slot: Slot) -> None:
        self.append(slot)


@pytest.fixture
def discarded() -> Discarded:
    notices.reset()
    return Discarded()


@pytest.fixture
def pool(discarded) -> SlotPool:
    return SlotPool(2, discarded)


def test_the_next_cache_has_the_addresses_of_the_last_and_values_of_its_own(pool, discarded):
    first = pool.lease("size", make)
    before = addresses(first)
    for tensor in tensors(first):
        tensor.fill_(9)
    del first
    second, fresh = pool.lease("size", lambda: make(5.0)), make(5.0)
    assert addresses(second) == before and not discarded
    assert all(torch.equal(a, b) for a, b in zip(tensors(second), tensors(fresh), strict=True))


def test_two_caches_at_a_time_share_nothing(pool):
    a, b = pool.lease("size", make), pool.lease("size", make)
    assert not set(addresses(a)) & set(addresses(b)) and pool.slot(a) is not pool.slot(b)


def test_buffers_of_a_window_are_not_made_a_second_time(pool):
    first = pool.lease("size", make)
    window = first.branches[0][0].kv.k.nbytes
    del first
    with torch.profiler.profile(profile_memory=True) as profile:
        pool.lease("size", make)
    assert max(event.cpu_memory_usage for event in profile.events()) < window


def test_what_somebody_else_may_hold_is_copied_not_taken(pool):
    picture = torch.ones(2)
    first = pool.lease("size", lambda: make(picture=picture))
    assert first.branches[0][0].picture is not picture and torch.equal(first.branches[0][0].picture, picture)
    del first
    pool.lease("size", lambda: make(picture=torch.zeros(2)))
    assert torch.equal(picture, torch.ones(2))


def test_facts_beside_the_branches_are_left_alone(pool):
    given = torch.ones(3)
    assert pool.lease("size", lambda: make(given=given)).given is given


def test_a_slot_is_free_when_nobody_holds_its_cache_any_more(pool):
    cache = pool.lease("size", make)
    part = cache.branches
    assert (pool.free, len(pool.slots)) == (0, 1)
    del cache
    assert (pool.free, len(pool.slots)) == (1, 1) and part


def test_at_most_so_many_slots_and_beyond_them_a_cache_of_its_own(pool, capsys):
    leased = [pool.lease("size", make) for _ in range(4)]
    assert len(pool.slots) == 2 and [pool.slot(cache) is None for cache in leased] == [False, False, True, True]
    assert all(pool.node(block) is None for block in leased[2].branches)
    assert capsys.readouterr().err.count("all 2 slots of CUDA graphs are taken") == 1
    with pytest.raises(ValueError, match="max_slots is 0"):
        SlotPool(0, Discarded())


def test_the_free_slot_that_was_used_longest_ago_makes_room_for_another_size(pool, discarded):
    a, b = pool.lease("a", make), pool.lease("b", lambda: make(window=5))
    slots = pool.slot(a), pool.slot(b)
    del b
    del a
    pool.lease("c", lambda: make(window=6))
    assert discarded == [slots[1]] and [slot.key for slot in pool.slots] == ["a", "c"]


def test_a_cache_of_another_form_under_the_same_key_costs_the_graphs(pool, discarded):
    pool.lease("size", make)
    cache = pool.lease("size", lambda: make(window=5))
    assert discarded == [pool.slot(cache)]
    assert cache.branches[0][0].kv.k.shape[1] == 15 and cache.branches[0][0].kv.geometry.window == 5
    del cache
    again = pool.lease("size", lambda: make(window=5))
    assert discarded == [pool.slot(again)], "and from then on this is its form"


def test_replaced_values_are_copied_in_before_a_pass(pool, discarded):
    cache = pool.lease("size", make)
    node = pool.node(cache.branches[0])
    assert node.refresh() is False
    before = addresses(cache)
    cache.branches[0][1].text = Text(torch.full((2,), 7.0), torch.full((3,), 8.0))
    assert node.refresh() is False and addresses(cache) == before
    assert cache.branches[0][1].text.k.tolist() == [7, 7] and cache.branches[0][1].text.v.tolist() == [8, 8, 8]


@pytest.mark.parametrize("change", ["shape", "appears", "fact"])
def test_values_of_another_form_cost_the_graphs(pool, change):
    cache = pool.lease("size", make)
    block, node = cache.branches[0][0], pool.node(cache.branches[0])
    node.refresh()
    if change == "shape":
        block.text = Text(torch.ones(9), torch.ones(9))
    elif change == "appears":
        block.picture = torch.ones(2)
    else:
        block.state = 3
    assert node.refresh() is True and node.refresh() is False
    assert block.picture is None or block.picture.tolist() == [1, 1]


def test_a_value_that_moves_to_another_place_of_its_slot_is_not_overwritten(pool, discarded):
    cache = pool.lease("size", make)
    first, second = cache.branches[0]
    first.text.k.fill_(1), second.text.k.fill_(2)
    first.text, second.text = second.text, first.text
    pool.node(cache.branches[0]).refresh()
    assert first.text.k.tolist() == [2, 2] and second.text.k.tolist() == [1, 1]


def test_a_cache_that_cannot_be_made_leaves_its_slot_free(pool):
    def fail() -> Cache:
        raise ValueError("no such prompt")

    with pytest.raises(ValueError, match="no such prompt"):
        pool.lease("size", fail)
    assert pool.free == 1 and pool.slot(pool.lease("size", make)) is not None


def test_a_cache_of_unknown_parts_takes_no_slot(pool, capsys):
    def odd() -> Cache:
        cache = make()
        cache.branches[0][0].state = {1, 2}
        return cache

    cache = pool.lease("size", odd)
    assert pool.slot(cache) is None and pool.node(cache.branches[0]) is None
    assert "Cache takes no slot of CUDA graphs: it has a set" in capsys.readouterr().err
