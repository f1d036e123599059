"""What the members' comparisons with the originals share: the measure, recorded noise, merged LoRAs, batches timed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import bench_batch
import parity
from flashdreams.infra.rollout import to_uint8
from member import prompt, shrunk

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]


def test_equal_frames_have_no_difference_and_others_the_right_one() -> None:
    frames = torch.randint(0, 200, (3, 4, 6, 3), dtype=torch.uint8)
    assert parity.compare(frames, frames) == {
        "mean": 0, "worst_frame": 0, "worst_frame_number": 0, "first_frame": 0, "max": 0, "equal": 1,
    }  # fmt: skip
    other = frames.clone()
    other[1] += 51
    report = parity.compare(frames, other)
    assert report["mean"] == pytest.approx(0.2 / 3)
    assert (report["worst_frame_number"], report["first_frame"]) == (1, 0)
    assert report["worst_frame"] == report["max"] == pytest.approx(0.2)
    assert report["equal"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="cannot compare"):
        parity.compare(frames, other[:2])


def test_the_verdict_depends_on_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    report = parity.compare(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), torch.full((1, 2, 2, 3), 51, dtype=torch.uint8))
    assert (parity.verdict(report, 0.3), parity.verdict(report, 0.1)) == (0, 1)
    assert "FAIL: mean |d|/255 is 0.20000, threshold 0.1" in capsys.readouterr().out


def test_draws_are_taken_in_the_order_in_which_the_original_makes_them() -> None:
    draws = [torch.full((3, 16, 4, 6), float(i)) for i in range(6)]
    by_step = parity.draws_by_step(draws, lambda chunk: 3)
    assert {key: value.mean().item() for key, value in by_step.items()} == {
        (0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 4, (1, 2): 5,
    }  # fmt: skip
    assert by_step[1, 2].shape == (1, 16, 3, 4, 6)
    with pytest.raises(SystemExit, match="1 draws are left for chunk 1, which needs 3"):
        parity.draws_by_step(draws[:4], lambda chunk: 3)


def test_what_torch_draws_is_recorded() -> None:
    with parity.recorded("randn_like") as drawn:
        made = torch.randn_like(torch.zeros(4))
    torch.randn_like(torch.zeros(4))
    assert len(drawn) == 1 and torch.equal(drawn[0], made)


def test_noise_of_seeded_callers_alone_is_recorded_where_asked_and_torch_is_left_as_it_was() -> None:
    randn = torch.randn
    with parity.recorded("randn", seeded=True) as drawn:
        torch.randn(2)
        noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    assert torch.randn is randn
    assert len(drawn) == 1 and torch.equal(drawn[0], noise)


def test_frames_of_the_original_are_rounded_as_ours() -> None:
    video = torch.rand(3, 4, 6, 8) * 2.4 - 1.2
    assert torch.equal(parity.to_uint8(video), to_uint8(video[None])[0])


def test_a_folder_that_is_no_clone_is_refused_and_another_commit_is_said(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="is no git clone"):
        parity.check_clone(tmp_path / "none", "abc")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = parity.check_clone(tmp_path, "0" * 40)
    assert "check what it calls" in capsys.readouterr().err
    assert parity.check_clone(tmp_path, head) == head and capsys.readouterr().err == ""


def test_the_lora_is_merged_as_written_out() -> None:
    base = {"model.blocks.0.ffn.0.weight": torch.randn(5, 3), "model.head.head.bias": torch.randn(2)}
    down, up = torch.randn(2, 3), torch.randn(5, 2)
    name = "base_model.model.blocks.0.ffn.0"
    lora = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    out = parity.merged_lora(base, lora)
    torch.testing.assert_close(out["model.blocks.0.ffn.0.weight"], base["model.blocks.0.ffn.0.weight"] + up @ down)
    assert torch.equal(out["model.head.head.bias"], base["model.head.head.bias"])
    with pytest.raises(SystemExit, match="expected all"):
        parity.merged_lora(base, lora | {"something.else": down})


@pytest.mark.parametrize("slug", ["self-forcing-t2v-1.3b", "wan22-t2v-a14b"])
def test_batches_are_timed_chunk_by_chunk_or_as_whole_clips(slug: str, monkeypatch, capsys) -> None:
    """On a small model of each kind; the scripts themselves want a GPU."""
    from flashdreams.config import derive_config
    from flashdreams.plugins.registry import get_runner

    small = derive_config(shrunk(get_runner(slug)), pipeline={"text_encoder": None})
    if slug.startswith("wan"):
        small = derive_config(small, pipeline={"diffusion_model": {"scheduler": {"num_steps": 2}}})
    pipeline = small.pipeline.setup()
    conditions = prompt()
    if slug.startswith("wan"):
        conditions = type(conditions)(conditions.text, conditions.text)
    monkeypatch.setattr(type(pipeline), "encode_prompts", lambda self, prompts: conditions)
    monkeypatch.setattr(bench_batch, "load_pipeline", lambda slug, device: pipeline)
    bench_batch.main(slug, 4, [1, 2], device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 2"]
    assert all("frames a second in all" in line and "'dit'" in line for line in lines)


@pytest.mark.parametrize("script", sorted(ROOT.glob("integrations/*/tests/parity_check/*.sh")), ids=str)
def test_a_script_is_valid_and_what_it_calls_exists(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    for name in ("bench_batch.py", "bench_wan.sh"):
        if name in script.read_text():
            assert (script.parents[4] / "tests/support" / name).is_file()
