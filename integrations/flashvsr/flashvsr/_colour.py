"""Colour correction: the large-scale colours of the low-quality clip on the details of the generated one.

Per frame, in float32; videos are ``[B, 3, F, H, W]`` in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 5


def adain(video: Tensor, reference: Tensor) -> Tensor:
    """``video`` with the mean and the deviation of ``reference``, per frame and channel."""
    video, reference = _wide(video), _wide(reference)
    mean, deviation = _statistics(video)
    reference_mean, reference_deviation = _statistics(reference)
    return ((video - mean) / deviation * reference_deviation + reference_mean).clamp(-1, 1)


def wavelet(video: Tensor, reference: Tensor) -> Tensor:
    """The details of ``video`` on what is left of ``reference`` after five blurs, each of twice the reach."""
    video, reference = _wide(video), _wide(reference)
    return (video - _blurred(video) + _blurred(reference)).clamp(-1, 1)


def keep(video: Tensor, reference: Tensor) -> Tensor:
    """``video`` as it was generated."""
    return _wide(video).clamp(-1, 1)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"adain": adain, "wavelet": wavelet, "none": keep}


def _statistics(video: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and the root of the biased variance and 1e-5, ``[B, 3, F, 1, 1]``."""
    variance, mean = torch.var_mean(video, dim=(-2, -1), correction=0, keepdim=True)
    return mean, (variance + 1e-5).sqrt()


def _blurred(video: Tensor) -> Tensor:
    """Five binomial 3x3 blurs, dilated by 1, 2, 4, 8, 16, the border repeated."""
    line = torch.tensor([0.25, 0.5, 0.25], dtype=video.dtype, device=video.device)
    kernel = torch.outer(line, line).expand(3, 1, 3, 3)
    frames = video.transpose(1, 2).flatten(0, 1)
    for level in range(LEVELS):
        reach = 2**level
        frames = F.conv2d(F.pad(frames, (reach,) * 4, mode="replicate"), kernel, dilation=reach, groups=3)
    return frames.unflatten(0, (len(video), -1)).transpose(1, 2)


def _wide(video: Tensor) -> Tensor:
    return video.to(torch.promote_types(video.dtype, torch.float32))
