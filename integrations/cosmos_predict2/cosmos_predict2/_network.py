"""The DiT of Cosmos-Predict2.5, with the key names of the published native checkpoints.

Plain PyTorch: it knows nothing of compile, graphs, quantization or parallelism. What belongs to one rollout comes in
as values: the text's keys and values of each block (:class:`TextKV`), and the rotary positions of the clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from cosmos_predict2._rope import rotate_halves
from cosmos_predict2.config import CosmosNetworkConfig
from flashdreams.core.attention import attention
from flashdreams.core.rope import Rope
from flashdreams.recipes.wan.layers import RMSNorm, gated_add, modulate, sinusoid


@dataclass(frozen=True)
class TextKV:
    """Keys and values ``[B, S, heads, head_dim]`` of the text in one block."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Time:
    """What the timesteps are to the blocks, in at least float32.

    ``embedded`` ``[B, F, dim]`` is the normalised sinusoid, whose SiLU every block puts through low-rank matrices of
    its own; ``shared`` ``[B, F, 3 * dim]`` is added to what comes out, in all of them alike. ``F`` is 1, or the number
    of latent frames.
    """

    embedded: Tensor
    shared: Tensor


class Modulation(nn.Sequential):
    """Shift and scale, and for blocks a gate, from the timestep (AdaLN-LoRA)."""

    def __init__(self, config: CosmosNetworkConfig, parts: int) -> None:
        super().__init__(
            nn.SiLU(),
            nn.Linear(config.dim, config.adaln_dim, bias=False),
            nn.Linear(config.adaln_dim, parts * config.dim, bias=False),
        )
        self.parts = parts

    def forward(self, time: Time) -> tuple[Tensor, ...]:
        """``parts`` tensors ``[B, F, 1, dim]``."""
        silu, down, up = self
        x = wide_linear(up, wide_linear(down, silu(time.embedded)))
        return (x + time.shared[..., : x.shape[-1]]).unsqueeze(2).chunk(self.parts, dim=-1)


class Attention(nn.Module):
    """Projections, and norms of queries and keys over each head by itself."""

    def __init__(self, config: CosmosNetworkConfig, source_dim: int) -> None:
        super().__init__()
        self.heads, self.backend = config.num_heads, config.attention
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(source_dim, config.dim, bias=False)
        self.v_proj = nn.Linear(source_dim, config.dim, bias=False)
        self.output_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.qk_eps)
        self.k_norm = RMSNorm(config.head_dim, config.qk_eps)

    def query(self, x: Tensor) -> Tensor:
        """``[B, L, dim] -> [B, L, heads, head_dim]``."""
        return self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1)))

    def encode(self, source: Tensor) -> TextKV:
        """Keys and values of ``source`` ``[B, S, source_dim]``."""
        k = self.k_norm(self.k_proj(source).unflatten(-1, (self.heads, -1)))
        return TextKV(k, self.v_proj(source).unflatten(-1, (self.heads, -1)))

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[B, L, dim]``."""
        return self.output_proj(attention(q, k, v, backend=self.backend).flatten(-2))


class FeedForward(nn.Module):
    """Two layers with an exact GELU between."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.layer1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.layer2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(F.gelu(self.layer1(x)))


class CosmosBlock(nn.Module):
    """Self-attention over the clip, attention to the text, and feed-forward; all three modulated and gated."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.self_attn = Attention(config, config.dim)
        self.cross_attn = Attention(config, config.context_dim)
        self.mlp = FeedForward(config)
        self.adaln_modulation_self_attn = Modulation(config, 3)
        self.adaln_modulation_cross_attn = Modulation(config, 3)
        self.adaln_modulation_mlp = Modulation(config, 3)

    def forward(self, x: Tensor, time: Time, rope: Rope, text: TextKV) -> Tensor:
        """``x`` ``[B, L, dim]`` -> the same shape."""
        shift, scale, gate = self.adaln_modulation_self_attn(time)
        x = gated_add(x, self.attend(modulate(x, shift, scale, self.eps), rope), gate)
        shift, scale, gate = self.adaln_modulation_cross_attn(time)
        query = self.cross_attn.query(modulate(x, shift, scale, self.eps))
        x = gated_add(x, self.cross_attn.read(query, text.k, text.v), gate)
        shift, scale, gate = self.adaln_modulation_mlp(time)
        return gated_add(x, self.mlp(modulate(x, shift, scale, self.eps)), gate)

    def attend(self, x: Tensor, rope: Rope) -> Tensor:
        """Self-attention with rotary positions."""
        own = self.self_attn.encode(x)
        q, k = rotate_halves(self.self_attn.query(x), rope), rotate_halves(own.k, rope)
        return self.self_attn.read(q, k, own.v)


class PatchEmbedding(nn.Module):
    """Patches of ``p x p`` latent pixels to tokens; within a patch the channel is outermost."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.patch = config.patch_size[1]
        width = config.in_dim * math.prod(config.patch_size)
        self.proj = nn.Sequential(nn.Identity(), nn.Linear(width, config.dim, bias=False))  # 0 cuts, in the original

    def forward(self, latent: Tensor) -> Tensor:
        """``[B, C, T, H, W] -> [B, L, dim]``, frame-major."""
        p = self.patch
        return self.proj(rearrange(latent, "b c t (h p) (w q) -> b (t h w) (c p q)", p=p, q=p))


class TimeEmbedding(nn.Module):
    """The part of the modulation that all blocks share."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.dim, config.dim, bias=False)
        self.linear_2 = nn.Linear(config.dim, 3 * config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return wide_linear(self.linear_2, F.silu(wide_linear(self.linear_1, x)))


class FinalLayer(nn.Module):
    """Modulated projection of each token to its patch of the flow."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.linear = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_dim, bias=False)
        self.adaln_modulation = Modulation(config, 2)

    def forward(self, x: Tensor, time: Time) -> Tensor:
        shift, scale = self.adaln_modulation(time)
        return self.linear(modulate(x, shift, scale, self.eps))


class CosmosNetwork(nn.Module):
    """Predicts the flow ``noise - clean`` of a clip."""

    def __init__(self, config: CosmosNetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = PatchEmbedding(config)
        self.t_embedder = nn.Sequential(nn.Identity(), TimeEmbedding(config))  # 0 is the sinusoid, in the original
        self.t_embedding_norm = RMSNorm(config.dim, config.eps)
        self.crossattn_proj = nn.Sequential(nn.Linear(config.text_dim, config.context_dim), nn.GELU())
        self.blocks = nn.ModuleList(CosmosBlock(config) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of tokens."""
        return self.final_layer.linear.weight.dtype

    def encode_text(self, text: Tensor) -> list[TextKV]:
        """Keys and values of every block for text ``[B, S, text_dim]``; every token is attended, padding included.

        Raises:
            ValueError: the text is too long, or of another width.
        """
        config = self.config
        if text.shape[1] > config.text_len or text.shape[2] != config.text_dim:
            raise ValueError(
                f"text is {list(text.shape)}; this network takes [batch, at most {config.text_len}, {config.text_dim}]"
            )
        context, blocks = self.crossattn_proj(text.to(self.dtype)), list[Any](self.blocks)
        return [block.cross_attn.encode(context) for block in blocks]

    def forward(self, latent: Tensor, timestep: Tensor, rope: Rope, text: list[TextKV]) -> Tensor:
        """Flow ``[B, out_dim, T, H, W]``.

        Args:
            latent: ``[B, in_dim, T, H, W]``: the sample, the mask of given frames, the mask of padding.
            timestep: ``1000 * sigma``, ``[B]`` or ``[B, T]``.
            rope: of the clip's tokens.
            text: of :meth:`encode_text`.
        """
        frames, height, width = latent.shape[2:]
        p = self.config.patch_size[1]
        x, time = self.x_embedder(latent.to(self.dtype)), self.embed_time(timestep)
        for block, text_kv in zip(self.blocks, text, strict=True):
            x = block(x, time, rope, text_kv)
        x = self.final_layer(x, time)
        return rearrange(
            x, "b (t h w) (p q c) -> b c t (h p) (w q)", t=frames, h=height // p, w=width // p, p=p, q=p
        )  # fmt: skip

    def embed_time(self, timestep: Tensor) -> Time:
        """Of timesteps ``[B]`` or ``[B, T]``."""
        if timestep.ndim == 1:
            timestep = timestep[:, None]
        wave = sinusoid(self.config.timestep_scale * timestep.double().flatten(), self.config.dim)
        wave = wave.to(torch.promote_types(self.dtype, torch.float32)).unflatten(0, timestep.shape)
        return Time(self.t_embedding_norm(wave), self.t_embedder(wave))


def wide_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear``, without bias, in the dtype of ``x``: what the timestep decides is computed in at least float32."""
    assert isinstance(linear, nn.Linear)
    return F.linear(x, linear.weight.to(x.dtype))
