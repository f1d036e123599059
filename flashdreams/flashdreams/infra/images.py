"""Given images and clips, as each kind of model takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.core.notices import say_once
from flashdreams.infra.decoder import VideoCodec

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


def from_uint8(image: Tensor) -> Tensor:
    """Image uint8 ``[..., H, W, 3]`` -> float32 ``[B, 3, H, W]`` in [-1, 1]."""
    if image.dtype != torch.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
        raise ValueError(f"image is {image.dtype} {list(image.shape)}; expected uint8 [H, W, 3] or [B, H, W, 3]")
    return image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).float() / 127.5 - 1


def encode_clip(pipeline: StreamInferencePipeline, video: Tensor) -> Tensor:
    """Latent ``[B, C, T, h, w]`` in float32 of a clip ``[B, 3, 1 + 4n, H, W]`` in [-1, 1]."""
    codec = pipeline.decoder
    if not isinstance(codec, VideoCodec):
        raise ValueError(f"{pipeline.config.name} cannot encode a first frame: its decoder works one way only")
    step = codec.config.temporal_compression
    if (video.shape[2] - 1) % step:
        raise ValueError(f"a given clip has {video.shape[2]} frames; expected 1 or 1 more than a multiple of {step}")
    video = video.to(pipeline.device, getattr(torch, codec.config.dtype))
    return codec.encode(video, codec.initialize_cache()).float()


def given_frames(
    pipeline: StreamInferencePipeline,
    image: Tensor,
    last: Tensor | None,
    height: int,
    width: int,
    latent_frames: int | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Condition slots that stand for given images, and the latents to begin the context with, if that is their way.

    Args:
        image: the first frame, uint8 ``[H, W, 3]`` or ``[B, H, W, 3]``.
        last: the last frame, for models that take one.
        height, width: pixels of the rollout.
        latent_frames: length of the clip; ``None`` for a model that goes on without end.
    """
    config = pipeline.config
    transformer, use = config.diffusion_model.transformer, config.image_use
    if transformer.takes_last_image != (last is not None):
        word = "needs a last frame too" if last is None else "takes no last frame"
        raise ValueError(f"{config.name} {word} (last_image)")
    pixels = from_uint8(torch.as_tensor(image)).to(pipeline.device)
    if (use != "concat" or config.image_size == "fixed") and pixels.shape[-2:] != (height, width):
        size = tuple(pixels.shape[-2:])
        raise ValueError(f"image is {size}; the rollout is {(height, width)} (height, width): resize it")
    if use != "concat":
        latent = encode_clip(pipeline, pixels[:, :, None])
        return ({"image_latent": latent}, None) if use == "stamp" else ({}, latent)
    given = [pixels] if last is None else [pixels, from_uint8(torch.as_tensor(last)).to(pipeline.device)]
    slots = concat_slots(pipeline, given, height, width, latent_frames)
    if pipeline.image_encoder is not None:
        dtype = getattr(torch, pipeline.image_encoder.config.dtype)
        tokens = [pipeline.image_encoder.encode(image.to(dtype)).float() for image in given]
        slots["image_embed"] = torch.cat(tokens, dim=1)
    return slots, None


def concat_slots(
    pipeline: StreamInferencePipeline, images: list[Tensor], height: int, width: int, latent_frames: int | None
) -> dict[str, Tensor]:
    """Latents of a clip that holds the first (and the last) frame and is grey elsewhere, and the mask of what is given.

    As published: bicubic to the clip's size, without antialiasing. The mask has a channel for each pixel frame of a
    latent one; the first latent frame, which is one pixel frame alone, is marked in all of them. A clip without end
    (``latent_frames`` is ``None``) ends where its latents no longer change: the last stands for all that follow.
    """
    resized = [
        image if image.shape[-2:] == (height, width)
        else F.interpolate(image, (height, width), mode="bicubic", align_corners=False)
        for image in images
    ]  # fmt: skip
    step = pipeline.config.decoder.temporal_compression if pipeline.config.decoder else 1
    if latent_frames is None:
        latent = _settling_latents(pipeline, resized[0], step)
        latent_frames = latent.shape[2]
        flags = torch.zeros(pipeline.config.frames_of(latent_frames), device=latent.device)
        flags[0] = 1
    else:
        count = pipeline.config.frames_of(latent_frames)
        video = torch.zeros(resized[0].shape[0], 3, count, height, width, device=resized[0].device)
        flags = torch.zeros(count, device=video.device)
        for frame, image in zip((0, count - 1), resized, strict=False):
            video[:, :, frame], flags[frame] = image, 1
        latent = encode_clip(pipeline, video)
    flags = torch.cat((flags[:1].expand(step), flags[1:])).unflatten(0, (latent_frames, step))
    mask = flags.T[None, :, :, None, None].expand(latent.shape[0], step, latent_frames, *latent.shape[-2:])
    return {"image_mask": mask.clone(), "image_latent": latent}


MAX_REACH = 256
"""Latent frames after which an encoder that still changes on a still picture is taken to have no finite reach."""


def _settling_latents(pipeline: StreamInferencePipeline, image: Tensor, step: int) -> Tensor:
    """Latents of ``image`` ``[B, 3, H, W]`` and grey frames after it, up to the first that equals the one before.

    A causal encoder looks back a finite time, so that under unchanging frames its latents become the same for good.
    """
    codec = pipeline.decoder
    if not isinstance(codec, VideoCodec):
        raise ValueError(f"{pipeline.config.name} cannot encode a first frame: its decoder works one way only")
    dtype = getattr(torch, codec.config.dtype)
    cache = codec.initialize_cache()
    latents = [codec.encode(image[:, :, None].to(pipeline.device, dtype), cache).float()]
    grey = torch.zeros_like(image[:, :, None], device=pipeline.device, dtype=dtype).expand(-1, -1, step, -1, -1)
    while len(latents) < MAX_REACH:
        latents.append(codec.encode(grey, cache).float())
        if len(latents) > 2 and torch.equal(latents[-1], latents[-2]):
            return torch.cat(latents, dim=2)
    say_once(
        f"the encoder of {pipeline.config.name} still changes after {len(latents)} latent frames of a still picture; "
        "frames beyond are told the last of them, which is not exact"
    )
    return torch.cat(latents, dim=2)
