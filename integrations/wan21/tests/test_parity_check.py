"""The comparison with the original, on made-up frames; running it needs a GPU and the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashdreams.infra.rollout import to_uint8
from wan21.config import WAN21_CONFIGS

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wan21_parity_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_frames_differ_by_nothing(script: ModuleType) -> None:
    frames = torch.randint(0, 256, (3, 4, 5, 3), dtype=torch.uint8)
    report = script.compare(frames, frames.clone())
    assert (report["mean"], report["worst_frame"], report["max"], report["equal"]) == (0, 0, 0, 1)


def test_a_difference_in_one_frame_is_measured_and_found(script: ModuleType) -> None:
    theirs = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    ours = theirs.clone()
    ours[2] = 51
    for a, b in ((ours, theirs), (theirs, ours)):
        report = script.compare(a, b)
        assert report["mean"] == pytest.approx(0.05) and report["worst_frame"] == pytest.approx(0.2)
        assert report["worst_frame_number"] == 2
        assert report["max"] == pytest.approx(0.2) and report["equal"] == 0.75


def test_videos_of_other_sizes_are_refused(script: ModuleType) -> None:
    frames = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    for other in (frames[:3], frames.float(), frames[0]):
        with pytest.raises(ValueError, match="cannot compare"):
            script.compare(frames, other)


def test_frames_of_the_original_are_rounded_as_ours(script: ModuleType) -> None:
    video = torch.rand(3, 4, 6, 8) * 2.4 - 1.2
    assert torch.equal(script.to_uint8(video), to_uint8(video[None])[0])


def test_noise_of_seeded_callers_is_kept_and_torch_is_left_as_it_was(script: ModuleType) -> None:
    randn = torch.randn
    with script.recorded_noise() as drawn:
        torch.randn(2)
        noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    assert torch.randn is randn
    assert len(drawn) == 1 and torch.equal(drawn[0], noise)


def test_it_knows_every_model_with_our_settings(script: ModuleType) -> None:
    assert script.MODELS.keys() == WAN21_CONFIGS.keys()
    for slug, (_, _, (width, height), *_, steps, shift) in script.MODELS.items():
        pipeline = WAN21_CONFIGS[slug].pipeline
        scheduler = pipeline.diffusion_model.scheduler
        assert (pipeline.width, pipeline.height, scheduler.num_steps, scheduler.shift) == (width, height, steps, shift)


def test_local_files_take_the_place_of_the_hubs(script: ModuleType) -> None:
    def sources(config) -> list[str]:
        from flashdreams.config import nested_configs

        own = [config.checkpoint_path] if getattr(config, "checkpoint_path", None) else []
        return own + [source for child in nested_configs(config) for source in sources(child)]

    for runner in WAN21_CONFIGS.values():
        before, after = sources(runner), sources(script.with_local_files(runner, Path("folder")))
        assert len(before) == len(after) >= 3
        for one, other in zip(before, after, strict=True):
            assert Path(other) == Path("folder", *one.removeprefix("hf://").split("/")[2:])


def test_the_command_line_says_what_is_missing(script: ModuleType, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["original", "--repo", str(tmp_path)])
    assert "--checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="clone the original"):
        script.check_clone(tmp_path)
