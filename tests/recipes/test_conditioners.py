"""What conditioners build on: hooks in the blocks, controls prepared once, clips without end, models without text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import (
    DecoderConfig,
    DiffusionModelConfig,
    EncoderConfig,
    PipelineConfig,
)
from flashdreams.infra.decoder import StreamingDecoder
from flashdreams.infra.encoder import ImageEncoder, StreamingEncoder
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.network import WanBlock, WanNetwork
from flashdreams.recipes.wan.vae_config import WanVAEConfig

pytestmark = pytest.mark.ci_cpu

CALLS: Counter[str] = Counter()


class Block(WanBlock):
    """Scales by a control after self-attention, counts tokens seen after cross-attention."""

    def initialize_state(self, geometry, batch, dtype, device) -> Any:
        return {"seen": torch.zeros(batch, 1 if geometry is None else geometry.window)}

    def after_self_attention(self, x, input, cache, context) -> Tensor:
        return x if input is None else x * (1 + input["scale"])

    def after_cross_attention(self, x, input, cache, context) -> Tensor:
        frames, rows, columns = context.shape
        assert x.shape[1] == frames * rows * columns
        cache.state["seen"][:, context.start % cache.state["seen"].shape[1]] = frames
        return x


class Network(WanNetwork):
    def make_block(self, index: int) -> WanBlock:
        return Block(self.config)

    def prepare(self, input: Any) -> Any:
        CALLS["prepare"] += 1
        return None if input is None else [{"scale": input.mean(dim=(1, 2))[:, None, None] * i} for i in range(2)]

    def block_input(self, index: int, input: Any) -> Any:
        CALLS["block"] += 1
        return None if input is None else input[index]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(WanNetworkConfig):
    _target: ClassVar[str] = f"{__name__}:Network"


@dataclass(frozen=True, kw_only=True)
class LoudConfig(EncoderConfig):
    """Numbers as controls; reads two frames ahead."""

    _target: ClassVar[str] = f"{__name__}:Loud"
    lookahead: ClassVar[int] = 2
    takes: ClassVar[ControlSpec] = ControlSpec(number=(-10, 10))


class Loud(StreamingEncoder):
    def initialize_cache(self, layout) -> dict[str, Any]:
        return {"size": (layout.height, layout.width), "rows": []}

    def encode(self, controls, start, stop, cache) -> Tensor:
        values = torch.tensor([[0.0 if c is None else c.number for c in row] for row in controls])
        cache["rows"].append(values.shape[1])
        return values[:, None]


@dataclass(frozen=True, kw_only=True)
class EchoConfig(DecoderConfig):
    """Frames whose colour is the mean of the chunk's controls."""

    _target: ClassVar[str] = f"{__name__}:Echo"


class Echo(StreamingDecoder):
    def initialize_cache(self) -> list[int]:
        return [0]

    def decode(self, latent: Tensor, cache: list[int], input: Any = None) -> Tensor:
        start, cache[0] = cache[0], cache[0] + latent.shape[2]
        frames = self.config.frames(start, cache[0])
        return torch.ones(len(latent), 3, frames, 16, 16) * input.mean(dim=(1, 2))[:, None, None, None, None]


NETWORK: dict[str, Any] = {
    "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "text_dim": 6, "text_len": 4, "freq_dim": 16,
    "in_dim": 16,
}  # fmt: skip


def pipeline_config(network: dict[str, Any] | None = None, **transformer: Any) -> PipelineConfig:
    return PipelineConfig(
        name="conditioned",
        encoder=LoudConfig(),
        diffusion_model=DiffusionModelConfig(
            transformer=WanTransformerConfig(
                network=NetworkConfig(**(NETWORK | (network or {}))), dtype="float32",
                **({"len_t": 2, "window_size_t": 6} | transformer),
            ),
            scheduler=FewStepSchedulerConfig(),
        ),
        decoder=EchoConfig(),
        height=16,
        width=16,
    )  # fmt: skip


def conditions(batch: int = 1, negative: bool = False) -> WanConditions:
    text = torch.randn(batch, 4, 6, generator=torch.Generator().manual_seed(3))
    return WanConditions(text, -text if negative else None)


def latents(config: PipelineConfig, num_chunk: int = 4, given: WanConditions | None = None, **options: Any) -> Tensor:
    CALLS.clear()
    rollout = config.setup().rollout(conditions=given or conditions(), num_chunk=num_chunk, **options)
    return torch.cat([chunk.latent for chunk in rollout], dim=2)


LOUD = [0.1 * i for i in range(29)]


def test_controls_are_prepared_once_per_chunk_and_the_numbers_stay_the_same():
    kept = latents(pipeline_config(), control=[LOUD])
    assert CALLS["prepare"] == 4
    assert CALLS["block"] == 2 * (4 * 4 + 3), "two blocks; four steps of four chunks, and three commits"
    again = latents(pipeline_config(reuse_controls=False), control=[LOUD])
    assert CALLS["prepare"] == 4 * 4 + 3
    assert torch.equal(kept, again)
    assert not torch.equal(kept, latents(pipeline_config(), control=[LOUD[::-1]]))


@pytest.mark.parametrize("cfg", ["batched", "sequential"])
def test_guidance_branches_share_what_was_prepared(cfg):
    options: dict[str, Any] = {"guidance_scale": 3.0, "cfg": cfg}
    both = latents(pipeline_config(**options), given=conditions(negative=True), control=[LOUD])
    assert CALLS["prepare"] == 4
    other = "sequential" if cfg == "batched" else "batched"
    same = latents(pipeline_config(**options | {"cfg": other}), given=conditions(negative=True), control=[LOUD])
    torch.testing.assert_close(both, same, rtol=1e-5, atol=1e-5)


def test_each_sample_of_a_batch_has_its_own_controls_in_both_branches():
    config = pipeline_config(guidance_scale=3.0)
    one = conditions(negative=True)
    two = WanConditions(one.text.repeat(2, 1, 1), one.negative_text.repeat(2, 1, 1))
    rollout = config.setup().rollout(conditions=two, num_chunk=2, control=[LOUD, LOUD[::-1]])
    batch = torch.cat([chunk.latent for chunk in rollout], dim=2)
    alone = latents(config, 2, one, control=[LOUD])
    torch.testing.assert_close(batch[:1], alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(batch[1:], latents(config, 2, one, control=[LOUD]), atol=1e-3)


def test_a_block_keeps_state_for_each_rollout_and_branch():
    pipeline = pipeline_config(guidance_scale=2.0, cfg="sequential").setup()
    one, other = (pipeline.rollout(conditions=conditions(negative=True), num_chunk=None, control=[LOUD]) for _ in "ab")
    next(one), next(one), next(other)
    states = [[b.blocks[1].state["seen"] for b in r.cache.experts[0].branches] for r in (one, other)]
    assert [state.tolist() for state in states[0]] == [[[2, 0, 2, 0, 0, 0]]] * 2
    assert [state.tolist() for state in states[1]] == [[[2, 0, 0, 0, 0, 0]]] * 2


def test_an_encoder_is_given_the_frames_it_looks_ahead_at_and_a_decoder_the_controls():
    rollout = pipeline_config().setup().rollout(conditions=conditions(), num_chunk=3, control=[[0.2] * 6])
    chunks = [(chunk, list(rollout.cache.encoder["rows"])) for chunk in rollout]
    assert chunks[-1][1] == [5 + 2, 8 + 2, 8 + 2]
    means = [0.2 * 6 / 7, 0.2 / 10, 0.0]
    for (chunk, _), mean in zip(chunks, means, strict=True):
        assert chunk.frames.float().mean().item() == pytest.approx((mean + 1) * 127.5, abs=0.51)


# Image clips without end


@dataclass(frozen=True, kw_only=True)
class TokensConfig(EncoderConfig):
    _target: ClassVar[str] = f"{__name__}:Tokens"


class Tokens(ImageEncoder):
    def encode(self, images: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(images, (5, 8)).mean(dim=1)


def still_config(**patch: Any) -> PipelineConfig:
    """A streaming model that reads a clip with its first picture in it, of few channels, and takes no text."""
    config = derive_config(
        pipeline_config({"in_dim": 36, "text_dim": None, "image_dim": 8, "image_tokens": 5}),
        {"diffusion_model.transformer.concat_image_mask_to_latent": True},
    )
    config = derive_config(
        config, encoder=None, decoder=WanVAEConfig(dim=4, num_res_blocks=1), image_encoder=TokensConfig()
    )
    return derive_config(config, patch)


def picture(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (16, 16, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_an_image_clip_ends_where_its_latents_stand_still():
    pipeline = still_config().setup()
    cache = pipeline.rollout(image=picture()).cache
    stored, mask = cache.conditions.image_latent, cache.conditions.image_mask
    clip = torch.zeros(1, 3, 1 + 4 * 59, 16, 16)
    clip[:, :, 0] = picture().permute(2, 0, 1) / 127.5 - 1
    whole = pipeline.encode_video(clip)
    count = stored.shape[2]
    assert 3 <= count < 40
    torch.testing.assert_close(stored, whole[:, :, :count], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored[:, :, -1:].expand_as(whole[:, :, count:]), whole[:, :, count:])
    assert mask[:, :, 0].eq(1).all() and mask[:, :, 1:].eq(0).all()


def test_an_encoder_that_never_stands_still_is_said(monkeypatch, capsys):
    monkeypatch.setattr("flashdreams.infra.images.MAX_REACH", 4)
    cache = still_config().setup().rollout(image=picture(3)).cache
    assert cache.conditions.image_latent.shape[2] == cache.conditions.image_mask.shape[2] == 4
    assert "still changes after 4 latent frames of a still picture" in capsys.readouterr().err


def test_what_lies_beyond_the_stored_clip_reads_its_last_latent():
    """Rolled on past the clip, each chunk equals one made with the whole clip stored."""
    pipeline = still_config().setup()
    rollout = pipeline.rollout(image=picture(), num_chunk=14, seed=1)
    stored = rollout.cache.conditions
    assert stored.image_latent.shape[2] < 28
    long = {name: value[:, :, [min(i, value.shape[2] - 1) for i in range(40)]]
            for name, value in stored.to_dict().items() if name != "image_embed"}  # fmt: skip
    full = WanConditions(**long, image_embed=stored.image_embed)
    want = torch.cat([chunk.latent for chunk in pipeline.rollout(conditions=full, num_chunk=14, seed=1)], dim=2)
    assert torch.equal(torch.cat([chunk.latent for chunk in rollout], dim=2), want)


def test_a_model_without_text_attends_to_image_tokens_by_its_ordinary_weights():
    pipeline = still_config().setup()
    network = pipeline.diffusion_model.transformer.network
    names = set(network.state_dict())
    assert not [name for name in names if "text" in name or "_img" in name]
    assert {name for name in names if name.startswith("img_emb")} >= {"img_emb.proj.1.weight", "img_emb.proj.4.bias"}
    tokens = torch.randn(1, 5, 8)
    attention: Any = network.blocks[1].cross_attn
    cache = network.encode_text(None, tokens)[1]
    proj = network.img_emb.proj
    x = proj[4](proj[3](nn.functional.gelu(proj[1](proj[0](tokens)))))
    torch.testing.assert_close(cache.text_v.flatten(2), attention.v(x))
    assert cache.image_k is None


def test_prompts_and_missing_images_are_refused_where_there_is_no_text():
    pipeline = still_config().setup()
    with pytest.raises(ValueError, match="takes no prompt, but got 'a boat'"):
        pipeline.rollout("a boat", image=picture())
    with pytest.raises(ValueError, match="makes a video from an image"):
        pipeline.rollout()
    with pytest.raises(ValueError, match="takes no prompt"):
        pipeline.rollout(image=picture()).set_prompt("a boat")
    with pytest.raises(ConfigError, match="takes no text to guide by"):
        still_config(**{"diffusion_model.transformer.guidance_scale": 2.0}).setup()
    with pytest.raises(ConfigError, match="cross-attention needs one"):
        NetworkConfig(text_dim=None).validate()


def test_a_rollout_without_text_is_saved_and_resumed(tmp_path):
    pipeline = still_config().setup()
    rollout = pipeline.rollout(image=picture(), seed=2)
    next(rollout), next(rollout)
    rollout.save(tmp_path / "state.safetensors")
    want = next(rollout).latent
    assert torch.equal(next(pipeline.resume(tmp_path / "state.safetensors")).latent, want)


# What is computed once


def contexts(pipeline: Any, rollout: Any) -> list[Tensor]:
    """Keys and values of every block and branch."""
    branches = rollout.cache.experts[0].branches
    return [part for branch in branches for block in branch.blocks for part in (block.self_kv.k, block.self_kv.v)]


@pytest.mark.parametrize("rope", ["absolute", "cache_relative"])
@pytest.mark.parametrize("cfg", ["batched", "sequential"])
def test_a_commit_leaves_what_a_whole_pass_would_and_computes_less(rope, cfg):
    options: dict[str, Any] = {"rope": rope, "sink_size_t": 2, "window_size_t": 6, "guidance_scale": 2.0, "cfg": cfg}
    plain = {"diffusion_model.transformer.network": WanNetworkConfig(**NETWORK)}
    config = derive_config(pipeline_config(**options), plain)
    kept = []
    for whole in (False, True):
        pipeline = config.setup()
        network = pipeline.diffusion_model.transformer.network
        if whole:
            network.remember = lambda *arguments, network=network: network.forward(*arguments)
        calls = Counter()
        network.blocks[1].ffn.register_forward_hook(lambda *_, calls=calls: calls.update(["last"]))
        network.blocks[0].ffn.register_forward_hook(lambda *_, calls=calls: calls.update(["first"]))
        rollout = pipeline.rollout(conditions=conditions(negative=True), num_chunk=None)
        for _ in range(5):
            next(rollout)
            rollout.flush()
        kept.append((contexts(pipeline, rollout), calls))
    (ours, less), (want, more) = kept
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))
    assert less["first"] == more["first"] == more["last"]
    assert more["last"] - less["last"] == 5 * (1 if cfg == "batched" else 2)


def test_a_block_with_state_of_its_own_is_committed_whole():
    pipeline = pipeline_config().setup()
    calls: Counter[str] = Counter()
    for block in pipeline.diffusion_model.transformer.network.blocks:
        block.ffn.register_forward_hook(lambda *_: calls.update(["ffn"]))
    rollout = pipeline.rollout(conditions=conditions(), num_chunk=None)
    next(rollout)
    rollout.flush()
    assert calls["ffn"] == 2 * 5


def test_vectors_of_a_timestep_are_made_once_per_rollout_and_anew_for_other_weights():
    pipeline = pipeline_config().setup()
    network = pipeline.diffusion_model.transformer.network
    made: list[int] = []
    network.time_embedding[0].register_forward_hook(lambda *_: made.append(0))
    count = lambda: len(rollout.cache.experts[0].times)  # noqa: E731
    rollout = pipeline.rollout(conditions=conditions(), num_chunk=None, seed=1)
    before = [next(rollout).latent for _ in range(2)]
    assert count() == 5, "four steps, and the timestep of a commit"
    with torch.no_grad():
        network.time_projection[1].bias += 1.0
        stale = pipeline.rollout(conditions=conditions(), num_chunk=None, seed=1)
    assert not torch.allclose(next(stale).latent, before[0], atol=1e-3)
    pipeline.diffusion_model.set_conditions(rollout.cache, rollout.cache.conditions)
    assert count() == 0


def test_stacked_vectors_are_the_single_ones_to_the_bit():
    network = pipeline_config().setup().diffusion_model.transformer.network
    for timestep in (torch.tensor([500.0, 20.0]), torch.tensor([[0.0, 700.0, 700.0]])):
        times = network.times(timestep)
        time = network.embed_time(timestep)
        many = network.times(timestep.repeat_interleave(100, dim=-1)[..., :300] if timestep.ndim == 2 else timestep)
        for number, block in enumerate(network.blocks):
            vectors = times.vectors(number, block.modulation)
            assert [tuple(v.shape) for v in vectors] == [(*time.index.shape, 1, 24)] * 6
            silu = torch.nn.functional.silu(time.table)
            table = network.time_projection[1](silu).unflatten(-1, (6, -1)) + block.modulation
            want = [part[time.index].unsqueeze(2) for part in table.unbind(1)]
            assert all(torch.equal(a, b) for a, b in zip(vectors, want, strict=True))
            if timestep.ndim == 2:  # one per token: not kept; a product of more rows may add in another order
                each = many.vectors(number, block.modulation)
                torch.testing.assert_close([a[:, ::100] for a in each], list(vectors), rtol=1e-6, atol=1e-6)
