"""Given frames and guidance on shrunken models, against the publication's rule written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cosmos_predict2._conditions import CosmosConditions
from flashdreams.config import derive_config
from flashdreams.core.noise import KeyedNoise
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig, UniPCSchedulerConfig

pytestmark = pytest.mark.ci_cpu

FRAMES = 4
SOLVERS = {
    "unipc": UniPCSchedulerConfig(num_steps=5, shift=5.0),
    "dpm++": DPMPPSchedulerConfig(num_steps=5, shift=5.0),
    "euler": FlowMatchEulerSchedulerConfig(num_steps=5, shift=5.0),
}


@pytest.fixture
def pipeline(shrunk) -> StreamInferencePipeline:
    return derive_config(shrunk().pipeline, text_encoder=None).setup()


def with_clip(pipeline: StreamInferencePipeline, conditions: CosmosConditions, frames: Tensor) -> CosmosConditions:
    """The latents of pixel frames uint8 ``[F, H, W, 3]`` among the conditions."""
    pixels = frames.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    return replace(conditions, image_latent=pipeline.encode_video(pixels))


def latent_of(pipeline: StreamInferencePipeline, conditions: CosmosConditions, **request) -> Tensor:
    return next(pipeline.rollout(conditions=conditions, num_frames=4 * FRAMES - 3, seed=3, **request)).latent


def inputs_of_the_network(pipeline: StreamInferencePipeline, conditions: CosmosConditions) -> list[tuple]:
    """Latent and timestep of every call in a rollout."""
    seen: list[tuple] = []
    network = pipeline.diffusion_model.transformer.network
    hook = network.register_forward_pre_hook(lambda _, arguments: seen.append((arguments[0].clone(), arguments[1])))
    latent_of(pipeline, conditions)
    hook.remove()
    return seen


@torch.no_grad()
def velocity_rule(pipeline: StreamInferencePipeline, conditions: CosmosConditions) -> Tensor:
    """As published: the network sees ``M g + (1 - M) x``; its flow on given frames is replaced by ``n - g``, of both
    branches, before guidance, so that the solver carries them from the first noise ``n``."""
    model, given = pipeline.diffusion_model, conditions.image_latent
    assert given is not None and conditions.negative_text is not None
    shape = (1, 16, FRAMES, *given.shape[3:])
    noise = KeyedNoise(3, ("0",)).initial(0, 0, shape)
    mask, known = torch.zeros(1, 1, FRAMES, 1, 1), torch.zeros(shape)
    mask[:, :, : given.shape[2]], known[:, :, : given.shape[2]] = 1, given
    plan = derive_config(pipeline.config, diffusion_model={"transformer": {"guidance_scale": 1.0}})
    single = type(model.transformer)(plan.diffusion_model.transformer)
    single.load_state_dict(model.transformer.state_dict())
    with pipeline.rollout(conditions=conditions, num_frames=4 * FRAMES - 3) as rollout:
        layout = rollout.cache.layout
    branches = [
        single.initialize_cache(layout, CosmosConditions(text, image_latent=given))
        for text in (conditions.text, conditions.negative_text)
    ]

    def flow(x: Tensor, step) -> Tensor:
        seen, t = mask * known + (1 - mask) * x, torch.tensor([step.timestep])
        made = [mask * (noise - known) + (1 - mask) * single.predict_flow(seen, t, branch) for branch in branches]
        return made[0] + 7.0 * (made[0] - made[1])

    return model.scheduler.sample(noise, flow, lambda step: torch.zeros(shape))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("solver", SOLVERS)
def test_given_frames_in_the_sample_make_what_the_published_rule_makes(shrunk, prompt, pictures, solver, count) -> None:
    config = derive_config(shrunk().pipeline, text_encoder=None, diffusion_model={"scheduler": SOLVERS[solver]})
    pipeline = config.setup()
    conditions = with_clip(pipeline, prompt, pictures(4 * count - 3))
    want, got = velocity_rule(pipeline, conditions), latent_of(pipeline, conditions)
    torch.testing.assert_close(got[:, :, count:], want[:, :, count:], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[:, :, :count], conditions.image_latent)
    torch.testing.assert_close(want[:, :, :count], got[:, :, :count], rtol=0, atol=5e-3)
    plain = latent_of(pipeline, prompt)
    assert not torch.allclose(plain[:, :, count:], got[:, :, count:], atol=1e-2), "what is given matters"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_network_sees_given_frames_their_mask_and_their_timestep(pipeline, prompt, pictures, count) -> None:
    conditions = with_clip(pipeline, prompt, pictures(4 * count - 3)) if count else prompt
    seen = inputs_of_the_network(pipeline, conditions)
    assert len(seen) == 3 * 2, "three steps of two guidance branches"
    for latent, timestep in seen:
        assert latent.shape == (1, 18, FRAMES, 4, 6)
        assert latent[0, 16, :, 0, 0].tolist() == [1.0] * count + [0.0] * (FRAMES - count)
        assert not latent[0, 17].any(), "nothing is padding"
        assert (latent[0, 16] == latent[0, 16, :, :1, :1]).all()
        if count:
            assert torch.equal(latent[0, :16, :count], conditions.image_latent[0])
            assert timestep.shape == (1, FRAMES)
            assert timestep[0, :count].tolist() == pytest.approx([0.1] * count)
            assert timestep[0, count:].unique().tolist() == [timestep[0, -1]] != [0.1]
        else:
            assert timestep.shape == (1,)


def test_given_frames_may_have_no_timestep_of_their_own(shrunk, prompt, pictures) -> None:
    transformer = {"given_timestep": None}
    config = derive_config(shrunk().pipeline, text_encoder=None, diffusion_model={"transformer": transformer})
    pipeline = config.setup()
    for _, timestep in inputs_of_the_network(pipeline, with_clip(pipeline, prompt, pictures())):
        assert timestep.shape == (1,)


def test_an_image_is_the_clip_of_one_frame(pipeline, prompt, pictures) -> None:
    got = latent_of(pipeline, prompt, image=pictures()[0])
    assert torch.equal(got, latent_of(pipeline, with_clip(pipeline, prompt, pictures())))


def test_both_ways_of_guidance_are_equal_and_scale_one_is_no_guidance(shrunk, prompt, pictures) -> None:
    def run(**transformer) -> Tensor:
        config = derive_config(shrunk().pipeline, text_encoder=None, diffusion_model={"transformer": transformer})
        pipeline = config.setup()
        return latent_of(pipeline, with_clip(pipeline, prompt, pictures()))

    sequential = run(cfg="sequential")
    torch.testing.assert_close(run(cfg="batched"), sequential, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(guidance_scale=1.0), sequential, atol=1e-3)
    assert not torch.allclose(run(guidance_scale=0.0), run(guidance_scale=1.0), atol=1e-3)


def test_texts_of_two_lengths_are_guided_by_one_after_the_other(shrunk, prompt) -> None:
    longer = torch.cat((prompt.negative_text, prompt.negative_text[:, :2]), dim=1)
    conditions = replace(prompt, negative_text=longer)
    results = [
        latent_of(
            derive_config(shrunk().pipeline, text_encoder=None, diffusion_model={"transformer": {"cfg": cfg}}).setup(),
            conditions,
        )
        for cfg in ("batched", "sequential")
    ]
    assert torch.equal(*results)


def test_rollouts_of_two_sizes_and_a_batch_interleave_as_if_each_ran_alone(pipeline, prompt, pictures) -> None:
    both = CosmosConditions(prompt.text.repeat(2, 1, 1) * torch.tensor([1.0, 0.5])[:, None, None],
                            prompt.negative_text.repeat(2, 1, 1))  # fmt: skip
    requests = [
        {"conditions": both, "num_frames": 9, "seed": 1, "image": pictures()[0]},
        {"conditions": prompt, "num_frames": 5, "seed": 2, "height": 48, "width": 32},
    ]
    alone = [next(pipeline.rollout(**request)).latent for request in requests]
    rollouts = [pipeline.rollout(**request) for request in requests]
    together = [next(rollout).latent for rollout in rollouts]
    assert [latent.shape for latent in together] == [(2, 16, 3, 4, 6), (1, 16, 2, 6, 4)]
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_predicting_twice_gives_the_same_and_new_conditions_take_their_place(pipeline, prompt) -> None:
    transformer = pipeline.diffusion_model.transformer
    with torch.no_grad(), pipeline.rollout(conditions=prompt, num_frames=9) as rollout:
        cache, noisy, t = rollout.cache.experts[0], torch.randn(1, 16, 3, 4, 6), torch.tensor([500.0])
        first = transformer.predict_flow(noisy, t, cache)
        assert torch.equal(transformer.predict_flow(noisy, t, cache), first)
        transformer.set_conditions(cache, CosmosConditions(prompt.negative_text, prompt.text))
        assert not torch.allclose(transformer.predict_flow(noisy, t, cache), first, atol=1e-3)
        transformer.commit(noisy, t, cache)
        with pytest.raises(ValueError, match="one chunk"):
            transformer.predict_flow(noisy, t, cache)


@pytest.mark.parametrize(
    ("frames", "size", "message"),
    [(3, (4, 6), "takes 1 to 2"), (1, (6, 4), "expected"), (0, (4, 6), "takes 1 to 2")],
)
def test_given_frames_that_do_not_fit_are_refused(pipeline, prompt, frames: int, size, message: str) -> None:
    conditions = replace(prompt, image_latent=torch.zeros(1, 16, frames, *size))
    with pytest.raises(ValueError, match=message):
        latent_of(pipeline, conditions)


def test_a_clip_that_is_given_whole_leaves_nothing_to_make(pipeline, prompt, pictures) -> None:
    with pytest.raises(ValueError, match="fewer than the 1 of the clip"):
        next(pipeline.rollout(conditions=prompt, num_frames=1, image=pictures()[0]))


def test_missing_or_misshapen_conditions_are_refused(pipeline, prompt) -> None:
    with pytest.raises(ValueError, match="needs a negative prompt"):
        latent_of(pipeline, replace(prompt, negative_text=None))
    with pytest.raises(ValueError, match="at most 180, 96"):
        latent_of(pipeline, CosmosConditions(torch.zeros(1, 181, 96), torch.zeros(1, 181, 96)))
    with pytest.raises(ValueError, match="expected \\[batch, tokens, width\\]"):
        CosmosConditions(torch.zeros(6, 96))
    with pytest.raises(ValueError, match="condition slots"):
        CosmosConditions.from_dict({"text": prompt.text, "image_embed": prompt.text})
    assert CosmosConditions.from_dict(prompt.to_dict()) == prompt
