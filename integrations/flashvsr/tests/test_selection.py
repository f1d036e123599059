"""Windows, and which of them read which: the rules written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashvsr._attention import budget, into_windows, neighbours, out_of_windows, select_windows

pytestmark = pytest.mark.ci_cpu

sides = st.integers(1, 6)


@given(sides, sides, st.integers(1, 12))
def test_a_window_may_see_those_within_the_range_and_the_border_cuts_it_off(
    rows: int, columns: int, reach: int
) -> None:
    seen = neighbours((rows, columns), reach)
    for r in range(rows):
        for c in range(columns):
            for r2 in range(rows):
                for c2 in range(columns):
                    down = r - reach // 2 <= r2 <= r - reach // 2 + reach - 1
                    across = c - reach // 2 <= c2 <= c - reach // 2 + reach - 1
                    assert seen[r * columns + c, r2 * columns + c2] == (down and across)


@given(st.integers(1, 3), sides, sides)
def test_windows_hold_frame_row_and_column_in_order(frames: int, down: int, across: int) -> None:
    window, shape = (2, 3, 4), (2 * frames, 3 * down, 4 * across)
    tokens = torch.arange(math.prod(shape)).view(1, -1, 1, 1)
    ordered = into_windows(tokens, shape, window)
    grid = tokens.view(shape)
    want = [
        grid[2 * f : 2 * f + 2, 3 * r : 3 * r + 3, 4 * c : 4 * c + 4].flatten()
        for f in range(frames) for r in range(down) for c in range(across)
    ]  # fmt: skip
    assert torch.equal(ordered.flatten(), torch.cat(want))
    assert torch.equal(out_of_windows(ordered, shape, window), tokens)


@pytest.mark.parametrize(
    ("height", "width", "ratio", "pairs"),
    [(768, 1280, 2.0, 7199), (768, 1280, 1.5, 5399), (1024, 1920, 2.0, 14399), (128, 128, 2.0, 119)],
)
def test_the_budget_is_the_published_one(height: int, width: int, ratio: float, pairs: int) -> None:
    """``int(N^2 * ratio * 768 * 1280 / (H * W)) - 1`` with the windows N of a row."""
    windows = (height // 128) * (width // 128)
    assert int(windows**2 * (ratio * 768 * 1280 / (height * width))) - 1 == pairs
    assert budget((height // 128, width // 128), (2, 8, 8), ratio) == pairs


def obvious_selection(q, k, grid, tokens, topk, reach):
    """One head, one row of queries, one pair of windows at a time."""
    windows = math.prod(grid)
    mean_q, mean_k = (x.unflatten(1, (-1, tokens)).mean(2) for x in (q, k))
    near = neighbours(grid, reach)
    chosen = torch.zeros(len(q), q.shape[2], mean_q.shape[1], mean_k.shape[1], dtype=torch.bool)
    for b in range(len(q)):
        for h in range(q.shape[2]):
            for row in range(mean_q.shape[1] // windows):
                weights = []
                for i in range(windows):
                    score = mean_k[b, :, h] @ mean_q[b, row * windows + i, h] / math.sqrt(q.shape[3])
                    allowed = near[i].repeat(mean_k.shape[1] // windows)
                    weights.append(torch.where(allowed, score, -math.inf).softmax(0))
                whole = torch.stack(weights)
                ordered = whole.flatten().sort(descending=True).values
                chosen[b, h, row * windows : (row + 1) * windows] = whole > ordered[min(topk, len(ordered) - 1)]
    return chosen


def drawn(rows: int, windows: int, tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows * windows * tokens, 2, 8, generator=generator, dtype=torch.float64)


@given(st.integers(1, 3), st.integers(1, 4), sides, sides, st.integers(1, 60), st.integers(1, 7), st.integers(0, 99))
def test_selection_is_that_of_the_rule_written_out(query_rows, key_rows, down, across, topk, reach, seed) -> None:
    q, k = drawn(query_rows, down * across, 4, seed), drawn(key_rows, down * across, 4, seed + 1)
    got = select_windows(q, k, (down, across), 4, topk, reach)
    assert torch.equal(got, obvious_selection(q, k, (down, across), 4, topk, reach))


def test_every_row_of_queries_has_the_budget_and_some_windows_get_more_of_it_than_others() -> None:
    q, k = drawn(3, 12, 4, 0), drawn(4, 12, 4, 1)
    chosen = select_windows(q, k, (3, 4), 4, 50, 3)
    assert (chosen.unflatten(2, (3, 12)).sum((-2, -1)) == 50).all()
    assert chosen.sum(-1).unique().numel() > 3


def test_a_budget_beyond_what_is_near_takes_all_of_it() -> None:
    q, k = drawn(1, 12, 4, 0), drawn(2, 12, 4, 1)
    chosen = select_windows(q, k, (3, 4), 4, 10_000, 3)
    assert torch.equal(chosen, neighbours((3, 4), 3).repeat(1, 2).expand_as(chosen))


def test_a_window_may_be_left_without_any() -> None:
    """The budget is one for all windows of a row: one with near certain weights takes it all."""
    q, k = torch.zeros(1, 2, 1, 2), torch.zeros(1, 4, 1, 2)
    q[0, 0, 0, 0], k[0, 0, 0, 0] = 100.0, 1.0
    chosen = select_windows(q, k, (1, 2), 1, 1, 3)
    assert chosen[0, 0].tolist() == [[True, False, False, False], [False] * 4]


@given(st.permutations(range(4)), st.integers(0, 99))
def test_the_order_of_rows_in_the_cache_decides_nothing(order: list[int], seed: int) -> None:
    """The ring holds rows in the order of their slots, the original's cache in that of time."""
    q, k = drawn(1, 6, 4, seed), drawn(4, 6, 4, seed + 1)
    shuffled = k.unflatten(1, (4, -1))[:, list(order)].flatten(1, 2)
    plain = select_windows(q, k, (2, 3), 4, 40, 3)
    other = select_windows(q, shuffled, (2, 3), 4, 40, 3)
    assert torch.equal(other, plain.unflatten(3, (4, -1))[..., list(order), :].flatten(3))
