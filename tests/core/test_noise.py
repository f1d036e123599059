"""Noise is a function of its key: the same on any machine, in any batch, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.core.noise import GivenNoise, KeyedNoise, check_seed, stream_key

pytestmark = pytest.mark.ci_cpu

SHAPE = (1, 2, 1, 4, 4)


def test_golden_vector():
    """These numbers may never change: every recorded seed depends on them."""
    assert stream_key(0, "0", 0, 0, "video/initial") == 426022289498969032
    assert stream_key(2**64 - 1, "a", 7, 2, "video/step") == 6454798601455651305
    initial = KeyedNoise(0).initial(0, 0, SHAPE)
    assert initial.dtype == torch.float32
    assert initial.flatten()[:4].tolist() == pytest.approx([0.558920, 0.093568, 0.598161, 0.992549], abs=2e-6)
    assert initial.flatten()[-1].item() == pytest.approx(-0.410888, abs=2e-6)
    step = KeyedNoise(42, ("left", "right")).step(3, 1, start=9, shape=(2, 1, 1, 1, 3))
    expected = [2.512614, 1.354831, 1.810225, -0.321555, -1.359385, -0.322367]
    assert step.flatten().tolist() == pytest.approx(expected, abs=2e-6)


@given(ids=st.lists(st.text(max_size=4), min_size=1, max_size=5, unique=True), data=st.data())
def test_a_sample_has_its_own_noise_wherever_it_stands_in_the_batch(ids: list[str], data: st.DataObject):
    order = data.draw(st.permutations(ids))
    shape = (len(ids), *SHAPE[1:])
    one, other = KeyedNoise(5, tuple(ids)), KeyedNoise(5, tuple(order))
    at = [order.index(sample_id) for sample_id in ids]
    assert torch.equal(one.initial(2, 6, shape), other.initial(2, 6, shape)[at])
    alone = KeyedNoise(5, (ids[0],)).step(2, 1, 6, SHAPE)
    assert torch.equal(one.step(2, 1, 6, shape)[:1], alone)


def test_noise_does_not_depend_on_the_order_of_calls_or_on_torchs_own_generator():
    noise = KeyedNoise(3)
    forward = [noise.initial(chunk, 3 * chunk, SHAPE) for chunk in range(3)]
    torch.manual_seed(1234)
    backward = [noise.initial(chunk, 3 * chunk, SHAPE) for chunk in reversed(range(3))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward)))


def test_every_part_of_the_key_makes_other_noise():
    draws = [
        KeyedNoise(1).initial(0, 0, SHAPE),
        KeyedNoise(2).initial(0, 0, SHAPE),
        KeyedNoise(1, ("1",)).initial(0, 0, SHAPE),
        KeyedNoise(1, component="audio").initial(0, 0, SHAPE),
        KeyedNoise(1).initial(1, 3, SHAPE),
        KeyedNoise(1).step(0, 0, 0, SHAPE),
        KeyedNoise(1).step(0, 1, 0, SHAPE),
        KeyedNoise(1).step(1, 0, 3, SHAPE),
    ]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)


def test_the_parts_of_a_key_cannot_run_into_each_other():
    """Sample "1" of chunk 11 is not sample "11" of chunk 1."""
    assert stream_key(0, "1", 11, 0, "x") != stream_key(0, "11", 1, 0, "x")


def test_noise_is_standard_normal():
    draw = KeyedNoise(8).initial(0, 0, (1, 16, 4, 32, 32))
    assert abs(draw.mean().item()) < 0.02
    assert abs(draw.std().item() - 1) < 0.02


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", None, True])
def test_a_seed_is_a_whole_number_of_64_bits(seed: object):
    with pytest.raises(ValueError, match="expected a whole number from 0 to 18446744073709551615"):
        KeyedNoise(seed)
    assert check_seed(2**64 - 1) == 2**64 - 1


def test_a_batch_needs_a_sample_id_each():
    with pytest.raises(ValueError, match="batch 2 was asked for 1 sample ids"):
        KeyedNoise(0).initial(0, 0, (2, 1, 1, 1, 1))


def test_given_noise_plays_back_the_frames_of_each_chunk():
    frames = torch.randn(1, 2, 5, 4, 4)
    fresh = torch.randn(1, 2, 2, 4, 4)
    noise = GivenNoise(frames, {(1, 0): fresh})
    assert torch.equal(noise.initial(0, 0, (1, 2, 3, 4, 4)), frames[:, :, :3])
    assert torch.equal(noise.initial(1, 3, (1, 2, 2, 4, 4)), frames[:, :, 3:])
    assert torch.equal(noise.step(1, 0, 3, (1, 2, 2, 4, 4)), fresh)


def test_given_noise_says_what_is_missing_or_misshapen():
    noise = GivenNoise(torch.zeros(1, 2, 4, 4, 4), {(0, 0): torch.zeros(1, 2, 3, 4, 4)})
    with pytest.raises(ValueError, match="chunk 1 needs noise up to latent frame 6; 4 were given"):
        noise.initial(1, 3, (1, 2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"no noise was given for chunk 0, step 1; given: \[\(0, 0\)\]"):
        noise.step(0, 1, 0, (1, 2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"step 0 has shape \[1, 2, 3, 4, 4\]; expected \[1, 2, 2, 4, 4\]"):
        noise.step(0, 0, 0, (1, 2, 2, 4, 4))
