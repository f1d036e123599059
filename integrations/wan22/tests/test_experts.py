"""The two experts of A14B: which one predicts at which noise level, and with which guidance."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from flashdreams.config import derive_config
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.network import BlockCache, ChunkContext
from wan22.config import WAN22_CONFIGS

pytestmark = pytest.mark.ci_cpu

T2V, I2V = "wan22-t2v-a14b", "wan22-i2v-a14b"
PROMPT = WanConditions(torch.ones(1, 6, 8), torch.zeros(1, 6, 8))
"""With the fake network: a flow of 1 with the prompt and of 0 with the negative one, so of ``guidance`` in all."""


@dataclass
class Record:
    """Who was asked at which timestep, and the flows that the solver was given."""

    calls: list[tuple[str, float]] = field(default_factory=list)
    flows: list[float] = field(default_factory=list)


class FakeNetwork(nn.Module):
    """Notes that it was called; predicts the mean of its text everywhere."""

    def __init__(self, name: str, record: Record) -> None:
        super().__init__()
        self.name, self.record = name, record
        self.patch_embedding = nn.Linear(1, 1)
        self.blocks = [SimpleNamespace(initialize_state=lambda *_: None)]

    def prepare(self, input: None) -> None:
        return input

    def place(self, context: ChunkContext) -> None:
        return None

    def times(self, timestep: Tensor) -> Tensor:
        return timestep

    def encode_text(self, text: Tensor, image: Tensor | None = None) -> list[BlockCache]:
        return [BlockCache(text, text)]

    def forward(self, latent: Tensor, timestep: Tensor, context, cache, input=None) -> Tensor:
        self.record.calls.append((self.name, float(timestep)))
        return cache.blocks[0].text_k.mean() * torch.ones_like(latent[:, :16])


def recorded(shrunk, slug: str) -> tuple[StreamInferencePipeline, Record]:
    """The pipeline with all its published steps, and both networks replaced by fakes."""
    steps = WAN22_CONFIGS[slug].pipeline.diffusion_model.scheduler.num_steps
    pipeline = derive_config(shrunk(slug).pipeline, {"diffusion_model.scheduler.num_steps": steps}).setup()
    model, record = pipeline.diffusion_model, Record()
    for expert, name in zip(model.experts, ("high", "low"), strict=True):
        expert.network = FakeNetwork(name, record)
    transition = model.scheduler.transition

    def spy(x: Tensor, flow: Tensor, *rest) -> Tensor:
        assert torch.equal(flow, flow.flatten()[0].expand_as(flow))
        record.flows.append(float(flow.flatten()[0]))
        return transition(x, flow, *rest)

    model.scheduler.transition = spy
    return pipeline, record


@pytest.mark.parametrize(("slug", "boundary", "guidance"), [(T2V, 875, {"low": 3.0, "high": 4.0}),
                                                            (I2V, 900, {"low": 3.5, "high": 3.5})])  # fmt: skip
def test_each_step_goes_to_its_expert_with_its_guidance(shrunk, picture, slug, boundary, guidance) -> None:
    pipeline, record = recorded(shrunk, slug)
    image = picture(64, 96) if slug == I2V else None
    list(pipeline.rollout(conditions=PROMPT, image=image, num_frames=5))
    experts, timesteps = zip(*record.calls[::2], strict=True)
    assert record.calls[::2] == record.calls[1::2], "two passes for each step, with and without the prompt"
    assert len(timesteps) == 40 and list(timesteps) == sorted(timesteps, reverse=True)
    assert all(t == int(t) for t in timesteps), "the network is told whole timesteps"
    assert list(experts) == ["high" if t >= boundary else "low" for t in timesteps]
    assert set(experts) == {"high", "low"}
    assert record.flows == [guidance[expert] for expert in experts]


def test_the_boundary_belongs_to_the_high_expert() -> None:
    for slug, boundary in ((T2V, 0.875), (I2V, 0.9)):
        (expert,) = WAN22_CONFIGS[slug].pipeline.diffusion_model.high_noise
        assert expert.sigma_low == boundary
        model = WAN22_CONFIGS[slug].pipeline.diffusion_model
        assert "high_noise_model" in (expert.transformer.checkpoint_path or "")
        assert "low_noise_model" in (model.transformer.checkpoint_path or "")


def test_the_experts_differ_in_weights_and_guidance_alone() -> None:
    for slug in (T2V, I2V):
        model = WAN22_CONFIGS[slug].pipeline.diffusion_model
        high = derive_config(
            model.high_noise[0].transformer,
            checkpoint_path=model.transformer.checkpoint_path,
            guidance_scale=model.transformer.guidance_scale,
        )
        assert high == model.transformer
        assert model.swap_experts


def test_both_experts_of_a_run_matter(shrunk, prompt) -> None:
    pipeline = shrunk(T2V).pipeline.setup()

    def latent() -> Tensor:
        return next(iter(pipeline.rollout(conditions=prompt, num_frames=5, seed=1))).latent

    plain = latent()
    for expert in pipeline.diffusion_model.experts:
        expert.network.head.head.weight.mul_(1.5)
        changed = latent()
        assert not torch.allclose(changed, plain, atol=1e-4)
        plain = changed


def test_the_image_reaches_both_experts_without_clip(shrunk, prompt, picture) -> None:
    """20 further channels, of the mask and of the latents, in every call; no image tokens."""
    pipeline = shrunk(I2V).pipeline.setup()
    seen: list[Tensor] = []
    for expert in pipeline.diffusion_model.experts:
        assert not hasattr(expert.network, "img_emb")
        expert.network.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))
    with pipeline.rollout(conditions=prompt, image=picture(70, 81), num_frames=9) as rollout:
        assert rollout.cache.conditions.image_embed is None
        list(rollout)
    assert len(seen) == 2 * 3 and all(x.shape == (1, 36, 3, 8, 12) for x in seen)
    assert all(torch.equal(x[:, 16:], seen[0][:, 16:]) for x in seen)
    assert seen[0][0, 16:20, :, 0, 0].T.tolist() == [[1] * 4, [0] * 4, [0] * 4]
    assert seen[0][0, 20:].abs().min() > 0, "the grey rest of the clip is encoded, not zero"
