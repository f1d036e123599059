"""The procedural world and the code that reads it back."""

from __future__ import annotations

import numpy as np
import pytest

from tiny_world._data import (
    HIGH,
    LOW,
    SPEED,
    actions_by_latent,
    combinations,
    render,
    sample_clips,
    simulate,
)
from tiny_world._measure import Score, held_keys
from tiny_world._vision import read_frame
from tiny_world._words import ACTIONS, BACKGROUNDS, COLOURS, SHAPES, UNK, VOCABULARY, tokenize

pytestmark = pytest.mark.ci_cpu


def test_generator_is_deterministic() -> None:
    one, two = sample_clips(7, 3, 9), sample_clips(7, 3, 9)
    assert one.captions == two.captions
    assert np.array_equal(render(one), render(two))
    assert sample_clips(8, 3, 9).captions != one.captions


def test_a_tenth_of_the_combinations_never_appears_in_training() -> None:
    held = set(combinations("heldout"))
    assert len(held) == 29
    assert held.isdisjoint(combinations("train"))
    assert held | set(combinations("train")) == set(combinations("all"))
    for sizes, axis in ((COLOURS, 0), (SHAPES, 1), (BACKGROUNDS, 2)):
        assert {combo[axis] for combo in combinations("train")} == set(range(len(sizes)))
    clips = sample_clips(0, 2000, 1, "train")
    drawn = set(zip(clips.colour.tolist(), clips.shape.tolist(), clips.background.tolist(), strict=True))
    assert drawn.isdisjoint(held)
    clips = sample_clips(0, 500, 1, "heldout")
    assert set(zip(clips.colour.tolist(), clips.shape.tolist(), clips.background.tolist(), strict=True)) == held


def test_captions_use_known_words_only() -> None:
    for caption in sample_clips(1, 300, 1, "all").captions:
        assert VOCABULARY.index(UNK) not in tokenize(caption)
        assert len(caption.split()) <= 12


def test_a_key_moves_and_stops_at_the_wall() -> None:
    actions = np.full((1, 60), ACTIONS.index("right"))
    path = simulate(np.array([[50.0, 60.0]], np.float32), np.zeros((1, 2), np.float32), actions)[0]
    assert np.allclose(np.diff(path[:10, 0]), SPEED)
    assert path[-1, 0] == HIGH
    assert (path[:, 1] == 60).all()


def test_no_key_coasts_and_reflects() -> None:
    start, velocity = np.array([[LOW + 4, 60.0]], np.float32), np.array([[-SPEED, 0.0]], np.float32)
    path = simulate(start, velocity, np.zeros((1, 5), int))[0, :, 0]
    assert np.allclose(path, [LOW + 4, LOW + 1, LOW + 2, LOW + 5, LOW + 8])


def test_latent_0_repeats_frame_0() -> None:
    assert actions_by_latent(np.array([[0, 1, 2, 3, 4]])).tolist() == [[[0, 0, 0, 0], [1, 2, 3, 4]]]
    with pytest.raises(ValueError, match="1 \\+ 4k"):
        actions_by_latent(np.zeros((1, 4), int))


def test_vision_reads_rendered_frames_back() -> None:
    clips = sample_clips(2, 40, 5, "all")
    noise = np.random.default_rng(0).normal(0, 8, (40, 128, 128, 3))
    frames = np.clip(render(clips)[:, 4] + noise, 0, 255).astype(np.uint8)
    for i, reading in enumerate(map(read_frame, frames)):
        seen = (reading.colour, reading.shape, reading.background, reading.striped)
        assert seen == (clips.colour[i], clips.shape[i], clips.background[i], clips.striped[i])
        assert np.abs(np.array(reading.centre) - clips.centres[i, 4]).max() < 1.5


def test_vision_sees_no_shape_on_a_bare_background() -> None:
    reading = read_frame(np.full((128, 128, 3), 107, np.uint8))
    assert (reading.colour, reading.shape) == (-1, -1)


def test_wilson_interval_against_published_values() -> None:
    """Newcombe (1998), table I: 81 of 263 and 0 of 20."""
    low, high = Score(81, 263).interval
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = Score(0, 20).interval
    assert (round(low, 4), round(high, 4)) == (0.0, 0.1611)


def test_held_keys_change_only_between_chunks() -> None:
    actions = held_keys(6, 5, seed=0)
    assert actions.shape == (5, 21)
    assert (actions[:, 0] == 0).all()
    assert (actions[:, 1:] > 0).all()
    assert (actions[:, 1:].reshape(5, 5, 4) == actions[:, 1:].reshape(5, 5, 4)[:, :, :1]).all()
