"""From keys and mouse motion to what each latent frame is told, against a slow reading of the publication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import Control, ControlError, Keys, Mouse
from flashdreams.infra.layout import ChunkPlan, Layout
from matrix_game_2.config import MATRIX_GAME_2_CONFIGS, ActionConfig, ActionEncoderConfig

pytestmark = pytest.mark.ci_cpu

LAYOUT = Layout(1, 16, 44, 80, ChunkPlan.of(3))


def config_of(name: str) -> ActionEncoderConfig:
    return MATRIX_GAME_2_CONFIGS[f"matrix-game-2-{name}"].pipeline.encoder


def told(name: str, control: object) -> list[float]:
    """Keys, pitch and yaw of one pixel frame."""
    config = config_of(name)
    return config.setup().row(config.takes.validate(control))


def told_of_latents(rows: Tensor, latents: int) -> Tensor:
    """Reference: rows ``[F, C]`` of the whole run -> ``[latents, 12, C]``. Twelve copies of row 0 stand in front, and
    latent frame j has rows 4j to 4j + 11 of that."""
    padded = torch.cat((rows[:1].repeat(12, 1), rows))
    return torch.stack([padded[4 * latent : 4 * latent + 12] for latent in range(latents)])


@pytest.mark.parametrize("chunks", [(3, 3, 3, 3), (1, 1, 2, 5), (4, 1, 1, 1, 1)])
def test_streamed_windows_are_those_of_the_whole_run(chunks: tuple[int, ...]) -> None:
    encoder = config_of("universal").setup()
    run = config_of("universal").parse_controls("w:5 a+look-up:3 none:4 d:7 s+look-left:30", 49)
    run = [*run, *[None] * (4 * sum(chunks) - 3 - len(run))]
    rows = torch.tensor([encoder.row(control) for control in run])
    want = told_of_latents(rows, sum(chunks))
    cache, start, frame, sizes = encoder.initialize_cache(LAYOUT), 0, 0, set()
    for size in chunks:
        stop, end = start + size, 4 * (start + size) - 3
        got = encoder.encode([run[frame:end]], start, stop, cache)
        assert torch.equal(got["keys"][0], want[start:stop, :, :4])
        assert torch.equal(got["mouse"][0], want[start:stop, :, 4:])
        start, frame = stop, end
        sizes.add(tuple(cache.rows.shape))
    assert sizes == {(1, 9, 6)}, "what is kept does not grow"


def test_a_frame_is_told_what_came_before_it() -> None:
    """A key at pixel frame 20 alone is not told to latent frame 5, which ends with it, but to the three after it."""
    encoder = config_of("universal").setup()
    run = [Control(keys=Keys("w")) if frame == 20 else None for frame in range(4 * 12 - 3)]
    keys = encoder.encode([run], 0, 12, encoder.initialize_cache(LAYOUT))["keys"]
    assert [latent for latent in range(12) if keys[0, latent].any()] == [6, 7, 8]
    assert keys[0, 6, 8, 0] == keys[0, 7, 4, 0] == keys[0, 8, 0, 0] == 1


def test_each_sample_of_a_batch_is_told_its_own() -> None:
    encoder = config_of("universal").setup()
    rows = [[Control(keys=Keys("w"))] * 9, [Control(keys=Keys("l"))] * 9]
    told = encoder.encode(rows, 0, 3, encoder.initialize_cache(LAYOUT))
    assert told["keys"][:, :, :, 0].flatten(1).unique(dim=1).tolist() == [[1], [0]]
    assert told["mouse"][:, :, :, 1].flatten(1).unique(dim=1).tolist() == [[0], [pytest.approx(0.1)]]


def test_a_chunk_of_the_wrong_length_is_refused() -> None:
    encoder = config_of("universal").setup()
    with pytest.raises(ValueError, match="8 frames were given for latent frames 0 to 2"):
        encoder.encode([[None] * 8], 0, 3, encoder.initialize_cache(LAYOUT))


@pytest.mark.parametrize(
    ("name", "control", "row"),
    [
        ("universal", None, [0, 0, 0, 0, 0, 0]),
        ("universal", "w", [1, 0, 0, 0, 0, 0]),
        ("universal", "Forward", [1, 0, 0, 0, 0, 0]),
        ("universal", "s", [0, 1, 0, 0, 0, 0]),
        ("universal", "left", [0, 0, 1, 0, 0, 0]),
        ("universal", "d", [0, 0, 0, 1, 0, 0]),
        ("universal", "w+d", [1, 0, 0, 1, 0, 0]),
        ("universal", "look-up", [0, 0, 0, 0, 0.1, 0]),
        ("universal", "k", [0, 0, 0, 0, -0.1, 0]),
        ("universal", "w+look-left", [1, 0, 0, 0, 0, -0.1]),
        ("universal", "i+l", [0, 0, 0, 0, 0.1, 0.1]),
        ("universal", Keys("ArrowUp"), [1, 0, 0, 0, 0, 0]),
        ("universal", Mouse(dx=0.05, dy=-0.02), [0, 0, 0, 0, 0.02, 0.05]),
        ("universal", Control(keys=Keys("a"), mouse=Mouse(dx=-0.1)), [0, 0, 1, 0, 0, -0.1]),
        ("gta-drive", None, [0, 0, 0, 0]),
        ("gta-drive", "w+a", [1, 0, 0, -0.1]),
        ("gta-drive", "back+right", [0, 1, 0, 0.1]),
        ("templerun", None, [1, 0, 0, 0, 0, 0, 0]),
        ("templerun", "jump", [0, 1, 0, 0, 0, 0, 0]),
        ("templerun", "s", [0, 0, 1, 0, 0, 0, 0]),
        ("templerun", "turn-left", [0, 0, 0, 1, 0, 0, 0]),
        ("templerun", "c", [0, 0, 0, 0, 1, 0, 0]),
        ("templerun", "left", [0, 0, 0, 0, 0, 1, 0]),
        ("templerun", "d", [0, 0, 0, 0, 0, 0, 1]),
        ("templerun", Keys("a", "w"), [0, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_words_and_keys_mean_what_is_published(name: str, control: object, row: list[float]) -> None:
    assert told(name, control) == pytest.approx(row)


def test_of_several_keys_an_endless_runner_is_told_the_latest() -> None:
    assert told("templerun", Keys("w").press("a")) == told("templerun", "left")
    assert told("templerun", Keys("w").press("a").release("a")) == told("templerun", "jump")


def test_a_mouse_faster_than_the_model_knows_is_slowed_down() -> None:
    assert told("universal", Mouse(dx=3, dy=3)) == pytest.approx([0, 0, 0, 0, -0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "control", "message"),
    [
        ("universal", "jump", "jump"),
        ("gta-drive", "look-up", "look-up"),
        ("templerun", Mouse(dx=0.1), "mouse"),
        ("universal", "w+hop", "hop"),
    ],
)
def test_what_a_model_does_not_know_is_refused_by_name(name: str, control: object, message: str) -> None:
    with pytest.raises(ControlError, match=message):
        told(name, control)


def test_a_script_of_words_says_how_long_each_is_held() -> None:
    config = config_of("universal")
    run = config.parse_controls("w:24 w+look-left:12 none:3", 60)
    assert len(run) >= 39
    rows = [config.setup().row(control) for control in run]
    assert rows[0] == rows[23] == told("universal", "w")
    assert rows[24] == rows[35] == told("universal", "w+look-left")
    assert rows[36] == rows[38] == told("universal", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keyboard_dim": 2}, "'left' is key 2; this model has 2"),
        ({"mouse_dim": 0}, "'look-up' moves the mouse"),
        ({"actions": (ActionConfig(words=("w",)), ActionConfig(words=("go", "w")))}, "each word once"),
        ({"actions": (ActionConfig(words=()),)}, "at least one each"),
    ],
)
def test_a_config_whose_words_fit_no_model_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        derive_config(config_of("universal"), **changes).setup()
