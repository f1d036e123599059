"""The stream under keys: interleaved, saved and gone on with, repeated from its record."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.controls import Keys
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout
from flashdreams.scripts.run import run as run_command

pytestmark = pytest.mark.ci_cpu

WAYS = Keys("w", "left"), Keys("d"), Keys("up", "w")


@pytest.fixture
def pipeline(shrunk) -> StreamInferencePipeline:
    return derive_config(shrunk("lingbot-world-fast").pipeline, text_encoder=None).setup()


def begin(pipeline: StreamInferencePipeline, prompt, image: Tensor, seed: int) -> Rollout:
    size = dict(zip(("height", "width"), image.shape[:2], strict=True))
    return pipeline.rollout(conditions={"text": prompt.text}, image=image, seed=seed, **size)


def chunk(rollout: Rollout, held: Keys) -> Tensor:
    rollout.set_control(held)
    return next(rollout).latent


def test_two_walks_of_different_sizes_interleave_as_if_each_were_alone(pipeline, prompt, picture) -> None:
    images = picture(32, 48), picture(48, 32, seed=1)
    alone = []
    for seed, (image, ways) in enumerate(zip(images, (WAYS[:2], WAYS[1:]))):
        with begin(pipeline, prompt, image, seed) as rollout:
            alone.append([chunk(rollout, held) for held in ways])
    with begin(pipeline, prompt, images[0], 0) as one, begin(pipeline, prompt, images[1], 1) as other:
        for i in range(2):
            assert torch.equal(chunk(one, WAYS[i]), alone[0][i])
            assert torch.equal(chunk(other, WAYS[i + 1]), alone[1][i])


def test_a_saved_walk_goes_on_bit_for_bit_from_where_the_camera_is(pipeline, prompt, picture, tmp_path: Path) -> None:
    with begin(pipeline, prompt, picture(32, 48), 5) as rollout:
        chunk(rollout, WAYS[0])
        rollout.save(tmp_path / "walk.safetensors")
        following = [chunk(rollout, held) for held in WAYS[1:]]
    with pipeline.resume(tmp_path / "walk.safetensors") as resumed:
        assert all(torch.equal(chunk(resumed, held), want) for held, want in zip(WAYS[1:], following, strict=True))


def test_a_run_from_a_picture_of_another_shape_is_repeated_from_its_record(
    shrunk, prompt, picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture goes to the model as it is, and is scaled there; the record must not have it cut to size before."""
    save_embeds(tmp_path / "prompt.safetensors", prompt.text)
    Image.fromarray(picture(70, 81).numpy()).save(tmp_path / "image.png")
    runner = derive_config(
        shrunk("lingbot-world-fast"), prompt_embeds=tmp_path / "prompt.safetensors", image=tmp_path / "image.png",
        output=tmp_path / "first.mp4", num_chunk=1, trajectory="forward", device="cpu", ckpt_path="random:0",
    )  # fmt: skip
    runner.setup().run()
    monkeypatch.setattr("lingbot.config.RUNNER_LINGBOT_WORLD_FAST", runner)
    words = ["lingbot-world-fast", "--replay", str(tmp_path / "first.json"), "--output", str(tmp_path / "second.mp4")]
    assert run_command(words, "flashdreams-run") == 0
    first, second = (frames_of(tmp_path / name) for name in ("first.mp4", "second.mp4"))
    assert len(first) == 13 and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def frames_of(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
