"""Given images and clips, as each kind of model takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

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
    pipeline: StreamInferencePipeline, image: Tensor, last: Tensor | None, height: int, width: int, latent_frames: int
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Condition slots that stand for given images, and the latents to begin the context with, if that is their way.

    Args:
        image: the first frame, uint8 ``[H, W, 3]`` or ``[B, H, W, 3]``.
        last: the last frame, for models that take one.
        height, width: pixels of the rollout.
        latent_frames: length of the clip, where the model has one.
    """
    config = pipeline.config
    transformer, use = config.diffusion_model.transformer, config.image_use
    if transformer.takes_last_image != (last is not None):
        word = "needs a last frame too" if last is None else "takes no last frame"
        raise ValueError(f"{config.name} {word} (last_image)")
    pixels = from_uint8(torch.as_tensor(image)).to(pipeline.device)
    if use != "concat":
        if pixels.shape[-2:] != (height, width):
            size = tuple(pixels.shape[-2:])
            raise ValueError(f"image is {size}; the rollout is {(height, width)} (height, width): resize it")
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
    pipeline: StreamInferencePipeline, images: list[Tensor], height: int, width: int, latent_frames: int
) -> dict[str, Tensor]:
    """Latents of a clip that holds the first (and the last) frame and is grey elsewhere, and the mask of what is given.

    As published: bicubic to the clip's size, without antialiasing. The mask has a channel for each pixel frame of a
    latent one; the first latent frame, which is one pixel frame alone, is marked in all of them.
    """
    step = pipeline.config.decoder.temporal_compression if pipeline.config.decoder else 1
    count = pipeline.config.frames_of(latent_frames)
    batch, device = images[0].shape[0], images[0].device
    video = torch.zeros(batch, 3, count, height, width, device=device)
    flags = torch.zeros(count, device=device)
    for frame, image in zip((0, count - 1), images, strict=False):
        resized = image
        if image.shape[-2:] != (height, width):
            resized = F.interpolate(image, (height, width), mode="bicubic", align_corners=False)
        video[:, :, frame], flags[frame] = resized, 1
    latent = encode_clip(pipeline, video)
    flags = torch.cat((flags[:1].expand(step), flags[1:])).unflatten(0, (latent_frames, step))
    mask = flags.T[None, :, :, None, None].expand(batch, step, latent_frames, *latent.shape[-2:])
    return {"image_mask": mask.clone(), "image_latent": latent}
