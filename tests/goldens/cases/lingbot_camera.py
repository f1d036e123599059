"""Poses, intrinsics and keys to the camera conditioning, by the functions and by the streaming encoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashdreams.core.controls import Control, Intrinsics, Keys
from flashdreams.infra.layout import ChunkPlan, Layout
from golden import Golden
from lingbot._camera import longest_step, relative, resample, steps
from lingbot._keys import MOVES
from lingbot._paths import CameraPath, controls_of
from lingbot.config import CameraEncoderConfig


def conditioning(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    frames, count = golden.config["frames"], golden.config["latent_frames"]
    points = torch.linspace(0, frames - 1, count, dtype=torch.float64)
    poses = resample(golden.inputs["c2ws"], points)
    yield "interpolated_poses", poses.float()
    seen = relative(poses[:1].expand_as(poses), poses)
    seen[:, :3, 3] /= seen[:, :3, 3].norm(dim=-1).max() or 1.0
    yield "relative_poses_to_first", seen.float()
    poses[:, :3, 3] /= longest_step(poses) or 1.0
    yield "relative_poses_framewise", steps(poses).float()
    yield from encoded(golden, frames)


def encoded(golden: Golden, frames: int) -> Iterator[tuple[str, Tensor]]:
    """The conditioning of the whole clip, at once and latent frame by latent frame."""
    config, count = golden.config, (frames - 1) // 4 + 1
    encoder = CameraEncoderConfig(takes_keys="wasd" in golden.inputs).setup()
    rows = [controls(golden, frames, 4)]
    layout = Layout(1, 16, config["height"] // 8, config["width"] // 8, ChunkPlan(count, count))
    yield "conditioning", encoder.encode(rows, 0, count, encoder.initialize_cache(layout))
    cache = encoder.initialize_cache(layout)
    parts = [
        encoder.encode([row[max(0, 4 * k - 3) : 4 * k + 1] for row in rows], k, k + 1, cache) for k in range(count)
    ]
    yield "conditioning", torch.cat(parts, dim=2)


def controls(golden: Golden, frames: int, chunk_frames: int) -> list[Control]:
    """The file's path and keys as the controls of a run of ``frames`` pixel frames."""
    inputs = golden.inputs
    seen = Intrinsics(*inputs["intrinsics"][0].tolist(), width=832, height=480)
    keys = None
    if "wasd" in inputs:
        rows = inputs["wasd"].tolist()
        keys = tuple(Keys(*(key for key, down in zip(MOVES, row, strict=True) if down)) for row in rows)
    return controls_of(CameraPath(inputs["c2ws"].double(), seen, keys), frames, chunk_frames)
