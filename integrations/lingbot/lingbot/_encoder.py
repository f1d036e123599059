"""Poses or held keys of each pixel frame to the camera conditioning of a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdreams.core.controls import Control, Intrinsics
from flashdreams.infra.encoder import StreamingEncoder
from flashdreams.infra.layout import Layout
from lingbot._camera import FOLD, PICTURE, fold, rays, steps
from lingbot._drive import move
from lingbot._keys import MOVES
from lingbot.config import FRAMES_PER_LATENT, CameraEncoderConfig


@dataclass
class CameraCache:
    """The cameras of one stream, by sample: where each is now, where it was at the last latent frame, where it began
    (all float64 ``[B, 4, 4]``), and its (fx, fy, cx, cy) ``[B, 4]`` in pixels of :data:`PICTURE`."""

    height: int
    width: int
    pose: Tensor
    latent_pose: Tensor
    origin: Tensor
    intrinsics: Tensor


class CameraEncoder(StreamingEncoder):
    """Where the camera is, from one latent frame to the next, as rays of each pixel.

    A frame's control is a pose (and the keys held at it, for the action model), or keys that move the camera on from
    where it is; with neither it stays. The pose of latent frame ``k`` is that of pixel frame ``4 k``.
    """

    config: CameraEncoderConfig
    anchor: Tensor

    def __init__(self, config: CameraEncoderConfig) -> None:
        super().__init__(config)
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # says device and number format

    def initialize_cache(self, layout: Layout) -> CameraCache:
        still = torch.eye(4, dtype=torch.float64).repeat(layout.batch, 1, 1)
        intrinsics = torch.tensor(self.config.intrinsics, dtype=torch.float64).repeat(layout.batch, 1)
        size = FOLD * layout.height, FOLD * layout.width
        return CameraCache(*size, still, still.clone(), still.clone(), intrinsics)

    def encode(self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: CameraCache) -> Tensor:
        """``[B, 384, stop - start, h, w]``; of the action model ``[B, 448, ...]``."""
        return torch.stack([self._sample(row, start, stop, cache, i) for i, row in enumerate(controls)])

    def _sample(self, row: Sequence[Control | None], start: int, stop: int, cache: CameraCache, sample: int) -> Tensor:
        first, last = max(0, FRAMES_PER_LATENT * (start - 1) + 1), FRAMES_PER_LATENT * (stop - 1)
        if len(row) != last + 1 - first:
            raise ValueError(f"{len(row)} controls were given for video frames {first} to {last}, one for each")
        poses, intrinsics, keys = [], [], []
        for frame, control in enumerate(row, start=first):
            cache.pose[sample] = self._next(control, frame, cache, sample)
            if frame % FRAMES_PER_LATENT == 0:
                poses.append(cache.pose[sample].clone())
                intrinsics.append(cache.intrinsics[sample].clone())
                keys.append([float(control is not None and key in (control.keys or ())) for key in MOVES])
        path = torch.stack(poses)
        seen = rays(
            steps(path, cache.latent_pose[sample] if start else None).to(self.anchor),
            torch.stack(intrinsics), cache.height, cache.width,
        )  # fmt: skip
        cache.latent_pose[sample] = path[-1]
        if not self.config.takes_keys:
            return fold(seen)
        held = torch.tensor(keys).to(self.anchor).T.repeat_interleave(FOLD * FOLD, dim=0)
        directions = fold(seen[..., 3:])
        return torch.cat((directions, held[:, :, None, None].expand(-1, -1, *directions.shape[-2:])))

    def _next(self, control: Control | None, frame: int, cache: CameraCache, sample: int) -> Tensor:
        """Where the camera is at ``frame``."""
        config, pose = self.config, cache.pose[sample]
        if control is not None and control.pose is not None:
            pose = torch.tensor(control.pose.matrix, dtype=torch.float64)
            pose[:3, 3] /= config.world_scale
            if control.pose.intrinsics is not None:
                cache.intrinsics[sample] = torch.tensor(in_picture(control.pose.intrinsics), dtype=torch.float64)
        elif control is not None and control.keys and frame > 0:  # frame 0 is the given picture
            distance, angle = (speed / FRAMES_PER_LATENT for speed in (config.move, math.radians(config.turn)))
            pose = move(pose, control.keys, cache.origin[sample], distance, angle)
        if frame == 0:
            cache.origin[sample] = pose
        return pose


def in_picture(intrinsics: Intrinsics) -> tuple[float, float, float, float]:
    """(fx, fy, cx, cy) in pixels of :data:`PICTURE`."""
    down, right = PICTURE[0] / intrinsics.height, PICTURE[1] / intrinsics.width
    return intrinsics.fx * right, intrinsics.fy * down, intrinsics.cx * right, intrinsics.cy * down
