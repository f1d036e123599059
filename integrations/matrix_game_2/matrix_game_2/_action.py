"""The action module: what keys and mouse do to the tokens of a frame.

Every token of the picture attends along time, and along time alone: to its own past, moved by the mouse, and to the
keys that were held. What earlier chunks left behind is kept in two rolling caches, in latent frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.core.attention import attention
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import Rope, apply_rope
from flashdreams.recipes.wan.layers import layer_norm
from flashdreams.recipes.wan.network import ChunkContext
from matrix_game_2.config import MatrixGame2NetworkConfig


@dataclass
class ActionCache:
    """What one action module keeps for one rollout.

    ``keyboard`` ``[B, window, ...]`` serves all tokens of a frame, which see the same keys; ``mouse``
    ``[B * S, window, ...]`` has a row for each of the ``S`` tokens of a frame, and is ``None`` where there is none.
    """

    keyboard: RollingKVCache
    mouse: RollingKVCache | None


@dataclass(frozen=True)
class BlockActions:
    """A chunk's actions as one action module takes them.

    ``mouse`` ``[B, T, window]`` are the rows before each latent frame; ``keys`` and ``values`` ``[B, T, heads, D]`` are
    those of the keyboard, keys not yet rotated.
    """

    keys: Tensor
    values: Tensor
    mouse: Tensor | None


@dataclass(frozen=True)
class Moment:
    """The chunk's place in time, the same for every action module.

    ``rope`` covers its ``T`` latent frames; ``slots`` ``[T]`` are their places in the caches, of which the first
    ``visible`` are read, or those that ``read`` names (recaching). Without slots the chunk attends to itself.
    ``mask`` restricts which frames each token sees, ``[T * S, frames read]`` (training).
    """

    rope: Rope
    slots: Tensor | None = None
    visible: int = 0
    read: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, context: ChunkContext, config: MatrixGame2NetworkConfig, dtype: torch.dtype) -> Moment:
        """In frames, what ``context`` says in tokens."""
        frames, rows, columns = context.shape
        device = context.rope.cos.device
        head_dim = config.action_dim // config.action_heads
        rope = time_rope(range(context.start, context.start + frames), head_dim, config, dtype).to(device)
        tokens = rows * columns
        mask = None if context.mask is None else context.mask[..., ::tokens]
        if context.slots is None:
            return cls(rope, mask=mask)
        read = None if context.read is None else context.read[::tokens] // tokens
        return cls(rope, context.slots[::tokens] // tokens, context.visible // tokens, read, mask)


class HeadNorm(nn.Module):
    """RMS norm of each head. Its weight is in every published file and was never multiplied: kept so that the files
    load whole and can be written whole, and left alone as in the original."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class ActionModule(nn.Module):
    """Mouse, then keyboard, each added to the tokens. Names of submodules are those of the published files."""

    def __init__(self, config: MatrixGame2NetworkConfig) -> None:
        super().__init__()
        self.heads, self.backend = config.action_heads, config.attention
        dim, inner, embed = config.dim, config.action_dim, config.action_embed_dim
        head_dim, rows = inner // config.action_heads, config.action_rows
        self.keyboard_embed = nn.Sequential(nn.Linear(config.keyboard_dim, embed), nn.SiLU(), nn.Linear(embed, embed))
        if config.mouse_dim:
            self.mouse_mlp = nn.Sequential(
                nn.Linear(dim + rows * config.mouse_dim, inner), nn.GELU("tanh"), nn.Linear(inner, inner),
                nn.LayerNorm(inner),
            )  # fmt: skip
            self.t_qkv = nn.Linear(inner, 3 * inner, bias=False)
            self.img_attn_q_norm = HeadNorm(head_dim, config.eps)
            self.img_attn_k_norm = HeadNorm(head_dim, config.eps)
            self.proj_mouse = zero_linear(inner, dim)
        self.key_attn_q_norm = HeadNorm(head_dim, config.eps)
        self.key_attn_k_norm = HeadNorm(head_dim, config.eps)
        # The query of the keyboard branch, in spite of its name.
        self.mouse_attn_q = nn.Linear(dim, inner, bias=False)
        self.keyboard_attn_kv = nn.Linear(rows * embed, 2 * inner, bias=False)
        self.proj_keyboard = zero_linear(inner, dim)

    def prepare(self, keys: Tensor, mouse: Tensor | None) -> BlockActions:
        """What of a chunk's actions depends on them alone.

        Args:
            keys: ``[B, T, rows, keyboard_dim]``, the pixel frames before each latent frame.
            mouse: ``[B, T, rows, mouse_dim]``.
        """
        embedded = self.keyboard_embed(keys.to(self.mouse_attn_q.weight.dtype)).flatten(2)
        k, v = self.keyboard_attn_kv(embedded).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return BlockActions(self.key_attn_k_norm(k), v, None if mouse is None else mouse.flatten(2))

    def forward(self, x: Tensor, actions: BlockActions, moment: Moment, cache: ActionCache | None) -> Tensor:
        """``x`` ``[B, T * S, dim]``, frame-major -> the same shape."""
        frames = len(moment.rope.cos)
        if actions.mouse is not None:
            x = x + self.proj_mouse(self._mouse(x, actions.mouse, moment, None if cache is None else cache.mouse))
        q = self.key_attn_q_norm(self.mouse_attn_q(x).unflatten(-1, (self.heads, -1)))
        q = rotate(q.unflatten(1, (frames, -1)), moment.rope).flatten(1, 2)
        k = apply_rope(actions.keys, moment.rope)
        k, v = remember(k, actions.values, moment, None if cache is None else cache.keyboard)
        # Keys and values are the same for all tokens of a frame, so that these are one sequence, not one each.
        return x + self.proj_keyboard(attention(q, k, v, mask=moment.mask, backend=self.backend).flatten(-2))

    def _mouse(self, x: Tensor, mouse: Tensor, moment: Moment, cache: RollingKVCache | None) -> Tensor:
        """Attention ``[B, T * S, inner]`` of each token to itself in the frames that are kept."""
        batch, frames = mouse.shape[:2]
        x = x.unflatten(1, (frames, -1))
        tokens = x.shape[2]
        first, gelu, second, norm = self.mouse_mlp
        assert isinstance(norm, nn.LayerNorm)
        moved = torch.cat((x, mouse.to(x.dtype)[:, :, None].expand(-1, -1, tokens, -1)), dim=-1)
        hidden = layer_norm(second(gelu(first(moved))), norm)
        q, k, v = self.t_qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(3)
        q, k = (
            rotate(norm(part), moment.rope) for part, norm in ((q, self.img_attn_q_norm), (k, self.img_attn_k_norm))
        )
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        k, v = remember(k, v, moment, cache)
        mask = None if moment.mask is None else moment.mask[..., ::tokens, :]
        y = attention(q, k, v, mask=mask, backend=self.backend).flatten(-2)
        return y.unflatten(0, (batch, tokens)).transpose(1, 2).flatten(1, 2)


def initialize_cache(
    config: MatrixGame2NetworkConfig, geometry: CacheGeometry, batch: int, dtype: torch.dtype, device: torch.device
) -> ActionCache:
    """Empty caches with the window of the self-attention that ``geometry`` describes.

    Raises:
        ValueError: its sink is kept raw, which these caches do not do.
    """
    if geometry.relative and geometry.sink:
        raise ValueError(
            f"rope is cache_relative with a sink of {geometry.sink} latent frames, which action modules do not have; "
            "use rope absolute, or sink_size_t 0"
        )
    frames = CacheGeometry(geometry.window, geometry.sink, 1)
    shape = config.action_heads, config.action_dim // config.action_heads

    def cache(rows: int) -> RollingKVCache:
        return RollingKVCache(frames, rows, *shape, dtype, device)

    return ActionCache(cache(batch), cache(batch * geometry.tokens_per_frame) if config.mouse_dim else None)


def remember(k: Tensor, v: Tensor, moment: Moment, cache: RollingKVCache | None) -> tuple[Tensor, Tensor]:
    """Keys and values to attend to, once those of the chunk have taken their slots."""
    if cache is None or moment.slots is None:
        return k, v
    cache.write(k, v, moment.slots)
    return cache.read(moment.visible) if moment.read is None else cache.gather(moment.read)


def time_rope(frames: range, head_dim: int, config: MatrixGame2NetworkConfig, dtype: torch.dtype) -> Rope:
    """Angles ``[len(frames), head_dim // 2]``: the first ``action_rope_dim`` dimensions turn with time. The rest are
    the original's rows and columns, of a picture of one token, and stay."""
    turning = config.action_rope_dim
    frequency = config.action_rope_theta ** -(torch.arange(0, turning, 2, dtype=torch.float64) / turning)
    angle = torch.tensor(frames, dtype=torch.float64)[:, None] * frequency
    angle = F.pad(angle, (0, (head_dim - turning) // 2))
    return Rope(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """``[B, T, S, heads, D]``, every token of a frame by the frame's angles."""
    return apply_rope(x.flatten(2, 3), rope).view(x.shape)


def zero_linear(inner: int, dim: int) -> nn.Linear:
    """A new head that changes nothing yet, as the original begins its training."""
    linear = nn.Linear(inner, dim, bias=False)
    nn.init.zeros_(linear.weight)
    return linear
