"""The ring cache sees exactly what a list of all frames, filtered by the window, would show it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdreams.core.attention import attention
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import apply_rope, rope_3d

pytestmark = pytest.mark.ci_cpu

HEADS, HEAD_DIM = 2, 12


@dataclass
class NaiveCache:
    """Keeps the raw keys and values of every frame for ever; picks and rotates those in sight at each call."""

    sink: int
    ring: int
    relative: bool
    rows: int
    columns: int
    frames: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attention of a chunk at frame ``start``, whose own frames replace any earlier attempt at them."""
        count = q.shape[1] // (self.rows * self.columns)
        end = start + count
        self.frames.update(zip(range(start, end), zip(k.chunk(count, 1), v.chunk(count, 1))))
        seen = [frame for frame in range(end) if frame < self.sink or frame >= end - self.ring]
        shift = max(0, end - self.sink - self.ring) if self.relative else 0
        positions = [frame + shift if frame < self.sink else frame for frame in seen]
        keys = torch.cat([self.frames[frame][0] for frame in seen], dim=1)
        values = torch.cat([self.frames[frame][1] for frame in seen], dim=1)
        q = apply_rope(q.double(), self.rope(range(start, end)))
        return attention(q, apply_rope(keys.double(), self.rope(positions)), values.double(), backend="reference")

    def rope(self, positions):
        return rope_3d(positions, self.rows, self.columns, HEAD_DIM, dtype=torch.float64)


@dataclass
class RingCache:
    """The cache under test, used as the network uses it."""

    cache: RollingKVCache
    rows: int
    columns: int
    prepared: int = -1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        geometry, cache = self.cache.geometry, self.cache
        per_frame = geometry.tokens_per_frame
        end = start + q.shape[1] // per_frame
        if geometry.relative and end > geometry.window and self.prepared != start:
            sink_rope = self.rope(geometry.sink_positions(end))
            cache.rotate_sink(sink_rope, min(start, geometry.sink) * per_frame)
        self.prepared = start
        rope, slots = self.rope(range(start, end)), geometry.token_slots(start, end)
        in_sink = max(0, min(end, geometry.sink) - start) * per_frame
        if in_sink:
            cache.write_raw_sink(k, slots, in_sink)
        cache.write(apply_rope(k, rope), v, slots)
        return attention(apply_rope(q, rope), *cache.read(geometry.visible(end) * per_frame))

    def rope(self, positions):
        return rope_3d(positions, self.rows, self.columns, HEAD_DIM)


@st.composite
def rollouts(draw: st.DrawFn):
    sink, ring = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, ring), min_size=1, max_size=8))
    return sink, ring, sizes


@settings(max_examples=60, deadline=None)
@given(
    rollout=rollouts(),
    grid=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    batch=st.integers(1, 3),
    relative=st.booleans(),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_the_ring_equals_a_list_of_all_frames(rollout, grid, batch: int, relative: bool, passes: int, seed: int):
    """Chunks of any lengths that fit the ring; each is passed several times (denoising steps, then the commit)."""
    (sink, ring, sizes), (rows, columns) = rollout, grid
    geometry = CacheGeometry(sink + ring, sink, rows * columns, relative)
    cache = RollingKVCache(geometry, batch, HEADS, HEAD_DIM, torch.float32, "cpu")
    fast, naive = RingCache(cache, rows, columns), NaiveCache(sink, ring, relative, rows, columns)
    generator, start = torch.Generator().manual_seed(seed), 0
    where = cache.k.data_ptr(), cache.v.data_ptr(), cache.k.shape
    for size in sizes:
        for _ in range(passes):
            shape = (batch, size * rows * columns, HEADS, HEAD_DIM)
            q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
            want = naive.attend(q, k, v, start)
            torch.testing.assert_close(fast.attend(q, k, v, start).double(), want, rtol=1e-5, atol=1e-5)
        start += size
    assert (cache.k.data_ptr(), cache.v.data_ptr(), cache.k.shape) == where, "buffers never move or grow"


@given(sink=st.integers(0, 5), ring=st.integers(1, 6), end=st.integers(1, 40))
def test_frames_in_sight_have_slots_of_their_own_and_fill_a_prefix(sink: int, ring: int, end: int):
    geometry = CacheGeometry(sink + ring, sink, tokens_per_frame=1)
    seen = [frame for frame in range(end) if frame < sink or frame >= end - ring]
    assert sorted(geometry.slot(frame) for frame in seen) == list(range(geometry.visible(end)))


def test_tokens_of_a_frame_stand_together():
    geometry = CacheGeometry(window=4, sink=1, tokens_per_frame=2)
    assert geometry.token_slots(3, 5).tolist() == [6, 7, 2, 3]


def test_a_repeated_pass_changes_nothing_else():
    """Denoising steps write into their chunk's own slots; what was committed before stays."""
    geometry = CacheGeometry(window=5, sink=1, tokens_per_frame=1)
    fast = RingCache(RollingKVCache(geometry, 1, HEADS, HEAD_DIM, torch.float32, "cpu"), 1, 1)
    q, k, v = (torch.randn(1, 8, HEADS, HEAD_DIM) for _ in range(3))
    for start in (0, 2, 4):
        fast.attend(q[:, :2], k[:, start : start + 2], v[:, start : start + 2], start)
    first = fast.attend(q[:, 6:], k[:, 6:], v[:, 6:], 6)
    fast.attend(q[:, 6:], torch.randn_like(k[:, 6:]), torch.randn_like(v[:, 6:]), 6)
    assert torch.equal(fast.attend(q[:, 6:], k[:, 6:], v[:, 6:], 6), first)


def test_the_two_position_policies_differ_only_once_the_window_has_moved_past_a_sink():
    caches = []
    for relative in (False, True):
        geometry = CacheGeometry(window=4, sink=1, tokens_per_frame=1, relative=relative)
        caches.append(RingCache(RollingKVCache(geometry, 1, HEADS, HEAD_DIM, torch.float32, "cpu"), 1, 1))
    for frame in range(6):
        q, k, v = (torch.randn(1, 1, HEADS, HEAD_DIM) for _ in range(3))
        absolute, relative = (cache.attend(q, k, v, frame) for cache in caches)
        assert torch.allclose(absolute, relative, atol=1e-6) == (frame < 4)


def test_half_precision_keys_are_stored_in_half_precision():
    geometry = CacheGeometry(window=2, sink=1, tokens_per_frame=1, relative=True)
    cache = RollingKVCache(geometry, 1, HEADS, HEAD_DIM, torch.bfloat16, "cpu")
    k = torch.randn(1, 1, HEADS, HEAD_DIM)
    cache.write_raw_sink(k, torch.tensor([0]), 1)
    cache.write(k, k, torch.tensor([0]))
    cache.rotate_sink(rope_3d([0], 1, 1, HEAD_DIM), 1)
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert torch.equal(cache.read(1)[0], k.bfloat16())


@pytest.mark.parametrize(("window", "sink"), [(3, 3), (3, 4), (3, -1), (0, 0)])
def test_the_sink_leaves_room_for_a_ring(window: int, sink: int):
    with pytest.raises(ValueError, match=f"sink={sink}, window={window}; expected 0 <= sink < window"):
        CacheGeometry(window, sink, tokens_per_frame=1)


def test_a_chunk_that_does_not_fit_the_ring_is_refused():
    with pytest.raises(ValueError, match="a chunk of 4 latent frames does not fit a ring of 3"):
        CacheGeometry(window=5, sink=2, tokens_per_frame=1).token_slots(0, 4)
