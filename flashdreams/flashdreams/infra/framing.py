"""Size, length and given images of a run: what the flags mean for the model at hand."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from flashdreams.config import import_object
from flashdreams.core.lengths import resolve_length
from flashdreams.core.media.clip import read_clip
from flashdreams.core.media.image import read_image
from flashdreams.core.notices import say_once
from flashdreams.core.sizes import area_size, cells_size, snap_size
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashdreams.infra.decoder import VideoCodec
from flashdreams.infra.errors import UserError
from flashdreams.infra.postprocess import UNCHANGED, ChainConfig


@dataclass(frozen=True)
class Framing:
    """Size, length and given frames of a run.

    ``num_frames`` is the length of a bidirectional model's one chunk, ``None`` otherwise. ``image`` and ``last_image``
    are uint8 ``[H, W, 3]``, ``clip`` uint8 ``[F, H, W, 3]``. ``latent_frames`` counts all, the given ones included.
    """

    height: int
    width: int
    num_chunk: int
    num_frames: int | None
    latent_frames: int
    image: Tensor | None = None
    last_image: Tensor | None = None
    clip: Tensor | None = None
    sized_by_image: bool = False
    """Whether the size was made for the image, which then goes to the model as it is."""
    from_video: bool = False
    """Whether each frame is made from one of a video."""

    @property
    def begins_with_given(self) -> bool:
        """Whether the first chunk shows an image or a video of the person's."""
        return self.image is not None or self.clip is not None or self.from_video


def frame_run(
    config: RunnerConfig, pipeline: PipelineConfig, fps: Fraction, postprocess: ChainConfig = UNCHANGED
) -> Framing:
    """Read what is given and settle size and length.

    Args:
        fps: of what the model makes.
        postprocess: what it goes through then; a length that is asked for is that of the file.

    Raises:
        UserError, ValueError, MediaError: with the value, what was expected and what to do.
    """
    _check_given(config, pipeline)
    transformer = pipeline.diffusion_model.transformer
    image = None if config.image is None else torch.from_numpy(read_image(config.image).pixels)
    height, width = _size(config, pipeline, image)
    last_image = clip = None
    own_size = pipeline.image_use == "concat" and pipeline.image_size != "fixed"
    own_size = own_size and config.height is None and config.width is None
    if config.image is not None and not own_size:
        image = torch.from_numpy(read_image(config.image, height, width).pixels)
    if config.last_image is not None:
        last_image = torch.from_numpy(read_image(config.last_image, height, width).pixels)
    stamped = pipeline.image_use == "stamp"
    if config.video is not None and pipeline.decoder is not None:
        most = transformer.max_given_frames if stamped else transformer.window_size_t or transformer.len_t
        clip = torch.from_numpy(
            read_clip(config.video, height, width, pipeline.frames_of(most), pipeline.decoder.temporal_compression)
        )
    given = 0
    if pipeline.image_use == "context":
        given = pipeline.latent_frames(len(clip)) if clip is not None else 0 if image is None else 1
    out = postprocess.output_frames
    length: dict[str, Any] = {
        "num_frames": config.num_frames, "duration": config.duration,
        "default_num_frames": out(config.default_num_frames), "fps": postprocess.output_fps(fps),
    }  # fmt: skip
    if not transformer.bidirectional:
        chunks = resolve_length(
            num_chunk=config.num_chunk, frames_until=lambda n: out(pipeline.frames_until(n, given)), **length
        )
        latent = pipeline.plan(given).frames_until(chunks)
        return Framing(height, width, chunks, None, latent, image, last_image, clip, own_size)
    if config.num_chunk not in (None, 1):
        raise UserError(f"{config.runner_name} makes a whole clip as one chunk; give its length with --num-frames")
    latent = resolve_length(
        unit="latent frame", frames_until=lambda n: out(pipeline.frames_of(n)) if n else 0, **length
    )
    return Framing(height, width, 1, pipeline.frames_of(latent), latent, image, last_image, clip, own_size)


def _size(config: RunnerConfig, pipeline: PipelineConfig, image: Tensor | None) -> tuple[int, int]:
    height, width, multiple = pipeline.height, pipeline.width, pipeline.size_multiple
    if image is not None and pipeline.image_size != "fixed" and config.height is None and config.width is None:
        rule = area_size if pipeline.image_size == "area" else cells_size
        own = image.shape[0], image.shape[1]
        size = rule(own, height * width, multiple)
        if size != (height, width):
            say_once(
                f"image {str(config.image)!r} is {own[0]}x{own[1]} (height x width), so the video is "
                f"{size[0]}x{size[1]}: its shape, at the pixels this model makes; --height and --width set another"
            )
        return size
    asked = height if config.height is None else config.height, width if config.width is None else config.width
    return snap_size(*asked, multiple, strict=config.strict_size)


def _check_given(config: RunnerConfig, pipeline: PipelineConfig) -> None:
    """Images and clips are those that the model takes."""
    slug, transformer = config.runner_name, pipeline.diffusion_model.transformer
    if pipeline.image_use == "concat" and config.image is None:
        raise UserError(f"{slug} makes a video from an image; give one (--image FILE)")
    if transformer.takes_last_image and config.last_image is None:
        raise UserError(f"{slug} makes what happens between two images; give the last one too (--last-image FILE)")
    if config.last_image is not None and not transformer.takes_last_image:
        raise UserError(f"{slug} takes no last image; leave --last-image out, or use a first-last-frame model")
    if config.image is None and config.video is None:
        return
    if pipeline.image_use == "context" and transformer.bidirectional:
        raise UserError(f"{slug} makes a video from text alone; leave --image and --video out, or use another model")
    if pipeline.decoder is None or not issubclass(import_object(pipeline.decoder._target), VideoCodec):
        raise UserError(f"{slug} can take no image and no clip: its decoder does not encode")
    if config.video is None:
        return
    if config.image is not None:
        raise UserError("--image and --video both say how the video begins; give one of them")
    if pipeline.image_use != "context" and transformer.max_given_frames == 1:
        raise UserError(f"{slug} cannot go on from a clip; give its last frame as --image, or use a streaming model")
