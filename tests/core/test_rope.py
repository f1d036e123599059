"""Rotary positions: Wan's angles, against complex multiplication in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdreams.core.rope import apply_rope, axis_dims, rope_3d

pytestmark = pytest.mark.ci_cpu


def rotate(x: Tensor, frames: list[int], height: int, width: int, theta: float = 10000.0) -> Tensor:
    """The reference: token by token, pair by pair, ``(a + ib) * exp(i * position * frequency)``."""
    dim = x.shape[-1]
    out = torch.empty_like(x, dtype=torch.float64)
    tokens = [(f, h, w) for f in frames for h in range(height) for w in range(width)]
    for token, position in enumerate(tokens):
        pair = 0
        for coordinate, size in zip(position, axis_dims(dim)):
            for j in range(size // 2):
                turn = complex(math.cos(a := coordinate / theta ** (2 * j / size)), math.sin(a))
                a, b = x[:, token, :, 2 * pair].double(), x[:, token, :, 2 * pair + 1].double()
                rotated = (a + 1j * b) * turn
                out[:, token, :, 2 * pair], out[:, token, :, 2 * pair + 1] = rotated.real, rotated.imag
                pair += 1
    return out


def test_axes_share_the_head_as_published():
    """Wan's heads of 128: 44 for time, 42 for rows, 42 for columns."""
    assert axis_dims(128) == (44, 42, 42)


def test_angles_are_the_published_ones():
    """``freqs[1]`` of Wan's table (time axis), and its product with position 7."""
    cosines = rope_3d([1, 7], 1, 1, 128, dtype=torch.float64).cos
    first = torch.tensor([1.0, 0.657933224657568, 0.43287612810830584, 0.2848035868435802], dtype=torch.float64)
    torch.testing.assert_close(cosines[0, :4], first.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(cosines[1, :4], (7 * first).cos(), rtol=0, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(
    frames=st.lists(st.integers(-5, 2000), min_size=1, max_size=3),
    height=st.integers(1, 3),
    width=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8, 12, 18, 32]),
)
def test_equals_complex_rotation(frames: list[int], height: int, width: int, head_dim: int):
    x = torch.randn(2, len(frames) * height * width, 3, head_dim)
    got = apply_rope(x, rope_3d(frames, height, width, head_dim))
    torch.testing.assert_close(got.double(), rotate(x, frames, height, width), rtol=1e-5, atol=1e-6)


def test_scores_depend_on_distances_only_however_far_the_rollout_is():
    """The reason ring keys may stay rotated by absolute positions for ever."""
    q, k = torch.randn(1, 1, 1, 64, dtype=torch.float64), torch.randn(1, 1, 1, 64, dtype=torch.float64)

    def score(frame_q: int, frame_k: int) -> Tensor:
        ropes = (rope_3d([frame], 1, 1, 64, dtype=torch.float64) for frame in (frame_q, frame_k))
        rotated_q, rotated_k = (apply_rope(x, rope) for x, rope in zip((q, k), ropes))
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(score(1_000_005, 1_000_000), score(5, 0), rtol=0, atol=1e-8)
    assert (score(5, 0) - score(6, 0)).abs() > 1e-3


def test_float32_angles_are_as_good_at_frame_100000_as_at_the_start():
    x = torch.randn(1, 1, 1, 64)
    got = apply_rope(x, rope_3d([100_000], 1, 1, 64))
    torch.testing.assert_close(got.double(), rotate(x, [100_000], 1, 1), rtol=0, atol=1e-6)


def test_half_precision_is_rounded_once():
    x = torch.randn(1, 6, 2, 32).bfloat16()
    rope = rope_3d(range(6), 1, 1, 32)
    got = apply_rope(x, rope)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply_rope(x.float(), rope).bfloat16())


def test_a_slice_of_tokens_is_the_rope_of_those_tokens():
    whole, part = rope_3d(range(4), 2, 3, 12), rope_3d([1, 2], 2, 3, 12)
    assert torch.equal(whole[6:18].cos, part.cos)
    assert torch.equal(whole[6:18].sin, part.sin)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="head_dim is 7"):
        rope_3d([0], 1, 1, 7)
