"""Camera geometry against slow and obvious references; the originals' numbers are in ``tests/goldens``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lingbot._camera import fold, longest_step, quaternions, rays, relative, resample, rotations, steps

pytestmark = pytest.mark.ci_cpu


def about(axis: tuple[float, float, float], degrees: float) -> Tensor:
    """Rotation matrix, by the matrix exponential."""
    x, y, z = (value / math.sqrt(sum(a * a for a in axis)) for value in axis)
    cross = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(math.radians(degrees) * cross)


def pose(rotation: Tensor, *place: float) -> Tensor:
    out = torch.eye(4, dtype=torch.float64)
    out[:3, :3], out[:3, 3] = rotation, torch.tensor(place, dtype=torch.float64)
    return out


def path(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    axes = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return torch.stack([pose(about(tuple(a.tolist()), 50 * i % 360), *(a * i).tolist()) for i, a in enumerate(axes)])


@pytest.mark.parametrize("degrees", [0, 1e-7, 30, 90, 179.9, 180, 270])
def test_quaternions_are_those_of_the_rotation(degrees: float) -> None:
    for axis in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -2, 3)):
        rotation = about(axis, degrees)
        torch.testing.assert_close(rotations(quaternions(rotation)), rotation, rtol=0, atol=1e-12)


def test_resampling_at_whole_numbers_returns_the_poses() -> None:
    poses = path(9)
    torch.testing.assert_close(resample(poses, torch.arange(9)), poses, rtol=0, atol=1e-12)
    torch.testing.assert_close(resample(poses[:1], torch.zeros(3)), poses[:1].repeat(3, 1, 1), rtol=0, atol=1e-12)


def test_between_two_poses_the_camera_turns_and_moves_evenly_the_short_way() -> None:
    first, last = pose(about((0, 1, 0), 350), 0, 0, 0), pose(about((0, 1, 0), 10), 4, 0, -8)
    between = resample(torch.stack((first, last)), torch.tensor([0.25, 0.5]))
    for part, got in zip((0.25, 0.5), between):
        want = pose(about((0, 1, 0), -10 + 20 * part), 4 * part, 0, -8 * part)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_steps_compose_to_the_path() -> None:
    poses = path(6)
    seen, current = steps(poses), poses[0]
    assert torch.equal(seen[0], torch.eye(4, dtype=torch.float64))
    for step, want in zip(seen[1:], poses[1:]):
        current = current @ step
        torch.testing.assert_close(current, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(steps(poses[3:], poses[2]), seen[3:])
    torch.testing.assert_close(relative(poses[:1].expand_as(poses), poses), torch.linalg.inv(poses[0]) @ poses)


def test_a_camera_that_stands_still_has_no_step_at_all_wherever_it_stands() -> None:
    """Else rounding errors would be scaled to full steps."""
    still = pose(about((1, 2, 3), 40), 1234.5, -0.1, 1e-3).repeat(5, 1, 1)
    assert not steps(still)[:, :3, 3].any()
    assert longest_step(still) == 0
    shaken = still.clone()
    shaken[2, 0, 3] += 1e-10
    assert longest_step(shaken) == 0
    shaken[2, 0, 3] += 1e-2
    assert longest_step(shaken) == pytest.approx(1e-2, rel=1e-6)
    assert longest_step(still[:1]) == 0


def test_rays_are_those_of_a_pinhole_camera() -> None:
    """Pixel by pixel, of a picture half the height and a quarter of the width that the intrinsics are stated for."""
    height, width, (fx, fy, cx, cy) = 240, 208, (500.0, 480.0, 410.0, 245.0)
    cameras = torch.stack((pose(torch.eye(3), 0, 0, 0), pose(about((1, 1, 0), 25), 0.1, -0.2, 0.9)))
    seen = rays(cameras, torch.tensor([[fx, fy, cx, cy]] * 2), height, width)
    for k, row, column in ((0, 0, 0), (1, 17, 200), (1, 239, 207)):
        x = ((column + 0.5) * 832 / width - cx) / fx
        y = ((row + 0.5) * 480 / height - cy) / fy
        through = torch.tensor([x, y, 1.0], dtype=torch.float64)
        want = torch.cat((cameras[k, :3, 3], cameras[k, :3, :3] @ (through / through.norm())))
        torch.testing.assert_close(seen[k, row, column], want)


def test_cells_hold_their_pixels_row_by_row_value_by_value() -> None:
    pixels = torch.randn(2, 16, 24, 3)
    folded = fold(pixels)
    assert folded.shape == (192, 2, 2, 3)
    for c, k, y, x, r, s in ((0, 0, 0, 0, 0, 0), (2, 1, 1, 2, 7, 3), (1, 0, 1, 0, 2, 6)):
        assert folded[64 * c + 8 * r + s, k, y, x] == pixels[k, 8 * y + r, 8 * x + s, c]
