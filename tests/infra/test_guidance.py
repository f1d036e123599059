"""Classifier-free guidance: what each scale means (cases B09), and that both ways of computing it agree."""

from __future__ import annotations

import math

import pytest
import torch

from flashdreams.config import ConfigError
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

PROMPT, NEGATIVE = "a red circle", "blurry and dark"


def clip(scale, prompt=PROMPT, negative=NEGATIVE, **options):
    pipeline = template_pipeline(guidance_scale=scale, **options)
    return torch.cat([c.latent for c in pipeline.rollout(prompt, negative_prompt=negative, seed=0, num_chunk=4)], 2)


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def test_one_is_the_prompt_alone_and_runs_one_branch():
    pipeline = template_pipeline(guidance_scale=1.0)
    assert len(pipeline.initialize_cache([PROMPT]).experts[0].branches) == 1
    assert torch.equal(clip(1.0), clip(1.0, negative="anything else"))


def test_zero_is_the_negative_prompt_alone():
    assert close(clip(0.0), clip(1.0, prompt=NEGATIVE))
    assert not close(clip(0.0), clip(1.0), 1e-3)


def test_scale_is_continuous_around_one_and_linear_between():
    assert close(clip(1.0001), clip(1.0), 2e-3)
    assert not close(clip(0.5), clip(0.0), 1e-3) and not close(clip(0.5), clip(1.0), 1e-3)
    first = [clip(scale)[:, :, :1] for scale in (0.0, 0.5, 1.0)]
    assert (first[1] - first[0]).norm() < (first[2] - first[0]).norm()


def test_exchanging_prompts_mirrors_the_scale():
    assert close(clip(0.3, PROMPT, NEGATIVE), clip(0.7, NEGATIVE, PROMPT))


def test_batched_equals_sequential():
    assert close(clip(3.0, cfg="batched"), clip(3.0, cfg="sequential"))


def test_the_missing_negative_prompt_is_the_published_one():
    assert torch.equal(
        clip(2.0, negative=None, negative_prompt="published words"), clip(2.0, negative="published words")
    )


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_other_scales_are_refused_with_their_value(scale):
    with pytest.raises(ConfigError, match=f"guidance_scale is {scale}"):
        template_pipeline(guidance_scale=scale)
