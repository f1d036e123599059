"""Camera poses and intrinsics to what the network is told of a camera (``wan/utils/cam_utils.py`` of the original).

Poses are camera-to-world ``[N, 4, 4]`` with OpenCV's axes: x right, y down, z forward. The network sees each latent
frame's camera relative to the one before it, as a ray per pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

PICTURE = 480, 832
"""Height and width that intrinsics (fx, fy, cx, cy) are stated for, whatever the size of the video."""
FOLD = 8
"""Pixels of a side that become one latent cell."""
RAYS = 6
"""Numbers of a ray: where it starts, and its direction."""


def resample(poses: Tensor, points: Tensor) -> Tensor:
    """Poses at fractional indices ``points`` ``[K]``, float64 ``[K, 4, 4]``: translations on straight lines between
    neighbours, rotations along the shortest arc (slerp)."""
    poses, points = poses.double(), points.double()
    before = points.floor().long().clamp(0, max(0, len(poses) - 2))
    after, part = (before + 1).clamp(max=len(poses) - 1), (points - before)[:, None]
    start, stop = quaternions(poses[before, :3, :3]), quaternions(poses[after, :3, :3])
    cosine = (start * stop).sum(-1, keepdim=True)
    stop = torch.where(cosine < 0, -stop, stop)
    angle = torch.atan2((stop - start).norm(dim=-1, keepdim=True), (stop + start).norm(dim=-1, keepdim=True)) * 2
    near = angle < 1e-9  # the arc is its chord
    sine = torch.where(near, torch.ones_like(angle), angle.sin())
    weight_start = torch.where(near, 1 - part, ((1 - part) * angle).sin() / sine)
    weight_stop = torch.where(near, part, (part * angle).sin() / sine)
    out = torch.eye(4, dtype=torch.float64).repeat(len(points), 1, 1)
    out[:, :3, :3] = rotations(weight_start * start + weight_stop * stop)
    out[:, :3, 3] = torch.lerp(poses[before, :3, 3], poses[after, :3, 3], part)
    return out


def quaternions(rotation: Tensor) -> Tensor:
    """Unit quaternions (x, y, z, w) ``[..., 4]`` of rotation matrices ``[..., 3, 3]``, up to sign."""
    xx, yy, zz = rotation.diagonal(dim1=-2, dim2=-1).unbind(-1)
    xy, yx, xz, zx, yz, zy = (rotation[..., i, j] for i, j in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)))
    # Four times the outer product of the quaternion with itself: its longest row is the best conditioned.
    rows = torch.stack(
        [
            torch.stack((1 + xx - yy - zz, xy + yx, xz + zx, zy - yz), -1),
            torch.stack((xy + yx, 1 - xx + yy - zz, yz + zy, xz - zx), -1),
            torch.stack((xz + zx, yz + zy, 1 - xx - yy + zz, yx - xy), -1),
            torch.stack((zy - yz, xz - zx, yx - xy, 1 + xx + yy + zz), -1),
        ],
        dim=-2,
    )
    longest = rows.norm(dim=-1).argmax(-1)
    row = rows.gather(-2, longest[..., None, None].expand(*longest.shape, 1, 4)).squeeze(-2)
    return row / row.norm(dim=-1, keepdim=True)


def rotations(quaternion: Tensor) -> Tensor:
    """Rotation matrices ``[..., 3, 3]`` of quaternions (x, y, z, w) of any length."""
    x, y, z, w = (quaternion / quaternion.norm(dim=-1, keepdim=True)).unbind(-1)
    entries = (
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(entries, -1).unflatten(-1, (3, 3))


def relative(to: Tensor, poses: Tensor) -> Tensor:
    """``poses`` ``[..., 4, 4]`` as seen from the cameras ``to``. Equal translations have a difference of exactly zero,
    which a general inverse would leave at a rounding error, and scaling then blow up."""
    turned = to[..., :3, :3].transpose(-2, -1)
    out = torch.eye(4, dtype=poses.dtype, device=poses.device).expand(poses.shape).clone()
    out[..., :3, :3] = turned @ poses[..., :3, :3]
    out[..., :3, 3:] = turned @ (poses[..., :3, 3:] - to[..., :3, 3:])
    return out


def steps(poses: Tensor, previous: Tensor | None = None) -> Tensor:
    """Each pose relative to the one before it, ``[K, 4, 4]``; the first to ``previous``, or to itself."""
    first = poses[:1] if previous is None else previous[None]
    out = relative(torch.cat((first, poses[:-1])), poses)
    if previous is None:
        out[0] = torch.eye(4, dtype=poses.dtype)
    return out


def longest_step(poses: Tensor) -> float:
    """Length of the longest translation from one of ``poses`` ``[K, 4, 4]`` to the next; 0 of a camera that stands
    still, whose rounding errors are no motion."""
    if len(poses) < 2:
        return 0.0
    longest = (poses[1:, :3, 3] - poses[:-1, :3, 3]).norm(dim=-1).max().item()
    return longest if longest > 1e-6 * max(1.0, poses[:, :3, 3].norm(dim=-1).max().item()) else 0.0


def rays(steps: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """Origin and direction of the ray through each pixel's centre, ``[K, height, width, 6]``.

    Args:
        steps: cameras ``[K, 4, 4]``.
        intrinsics: their (fx, fy, cx, cy) ``[K, 4]``, in pixels of :data:`PICTURE`.
        height, width: pixels of the video.
    """
    scale = torch.tensor((width / PICTURE[1], height / PICTURE[0]) * 2, dtype=steps.dtype, device=steps.device)
    fx, fy, cx, cy = (intrinsics.to(steps) * scale)[:, :, None, None].unbind(1)
    rows, columns = (torch.arange(n, dtype=steps.dtype, device=steps.device) + 0.5 for n in (height, width))
    x, y = torch.broadcast_tensors((columns - cx) / fx, (rows[:, None] - cy) / fy)
    through = torch.stack((x, y, torch.ones_like(x)), dim=-1)
    through = through / through.norm(dim=-1, keepdim=True)
    direction = torch.einsum("kij,khwj->khwi", steps[:, :3, :3], through)
    origin = steps[:, None, None, :3, 3].expand_as(direction)
    return torch.cat((origin, direction), dim=-1)


def fold(pixels: Tensor) -> Tensor:
    """Values of pixels ``[K, 8h, 8w, C]`` as channels of latent cells, ``[64 C, K, h, w]``: channel ``64 c + 8 r + s``
    is value ``c`` of the pixel in row ``r`` and column ``s`` of a cell."""
    cells = pixels.unflatten(2, (-1, FOLD)).unflatten(1, (-1, FOLD))
    return cells.permute(5, 2, 4, 0, 1, 3).flatten(0, 2)
