"""The CLIP vision tower, with the key names of Wan's checkpoint (Wan2.1 ``wan/modules/clip.py``)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.core.attention import attention
from flashdreams.infra.encoder import ImageEncoder
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.keymaps import CLIP_FROM_TRANSFORMERS
from flashdreams.recipes.wan.layers import layer_norm

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


class SelfAttention(nn.Module):
    """Attention among the tokens of one image."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.proj(attention(q, k, v).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each normed first and added."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = SelfAttention(config.dim, config.num_heads)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        hidden = config.mlp_ratio * config.dim
        self.mlp = nn.Sequential(nn.Linear(config.dim, hidden), nn.GELU(), nn.Linear(hidden, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(layer_norm(x, self.norm1))
        return x + self.mlp(layer_norm(x, self.norm2))


class CLIPVision(nn.Module):
    """The vision tower without its projection to the joint space of CLIP: ``post_norm`` and ``head`` are not used."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = nn.Parameter(torch.randn(1, 1, config.dim) * config.dim**-0.5)
        self.pos_embedding = nn.Parameter(torch.randn(1, config.num_tokens, config.dim) * config.dim**-0.5)
        self.patch_embedding = nn.Conv2d(3, config.dim, config.patch_size, stride=config.patch_size, bias=False)
        self.pre_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.transformer = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.post_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Parameter(torch.randn(config.dim, config.out_dim) * config.dim**-0.5)

    def forward(self, pixels: Tensor, blocks: int) -> Tensor:
        """Tokens of preprocessed pixels after the first ``blocks`` blocks."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_embedding.expand(len(patches), -1, -1), patches), dim=1) + self.pos_embedding
        x = layer_norm(x, self.pre_norm)
        for block in self.transformer[:blocks]:
            x = block(x)
        return x


class CLIPImageEncoder(ImageEncoder):
    """Images to the tokens that Wan2.1's image-to-video models attend to."""

    config: CLIPVisionConfig

    layouts: ClassVar = {"transformers": CLIP_FROM_TRANSFORMERS}

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__(config)
        self.visual = CLIPVision(config)

    def encode(self, images: Tensor) -> Tensor:
        """``[B, 257, 1280]`` tokens, the class token first, of images ``[B, 3, H, W]`` in [-1, 1] of any size: the
        output of the last block but one, not normed.

        Raises:
            ValueError: the images are of another shape.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images are {list(images.shape)}; expected [B, 3, H, W]")
        return self.visual(self.preprocess(images), self.config.num_layers - 1)

    def preprocess(self, images: Tensor) -> Tensor:
        """Resize to a square, whatever the shape, and normalise as CLIP was trained; in at least float32.

        As published: bicubic without antialiasing, and what it overshoots is kept. (diffusers crops instead.)
        """
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        size = (self.config.image_size,) * 2
        pixels = F.interpolate(wide, size, mode="bicubic", align_corners=False) * 0.5 + 0.5
        mean, std = pixels.new_tensor([MEAN, STD])[..., None, None].unbind()
        return (pixels - mean) / std
