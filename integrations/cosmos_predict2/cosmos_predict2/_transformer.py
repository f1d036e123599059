"""The Cosmos DiT under the contract of transformers: guidance, given frames, and the one chunk of a clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cosmos_predict2._conditions import CosmosConditions
from cosmos_predict2._keymaps import DIT_FROM_DIFFUSERS
from cosmos_predict2._network import CosmosNetwork, TextKV
from cosmos_predict2._rope import rope_angles
from cosmos_predict2.config import CosmosTransformerConfig
from flashdreams.core.attention import check_backend
from flashdreams.core.rope import Rope
from flashdreams.infra.layout import Layout
from flashdreams.infra.transformer import Transformer


@dataclass
class TransformerCache:
    """One rollout: ``branches`` are the text's keys and values of each block, per guidance branch (conditional,
    unconditional, or both stacked on the batch axis); ``rope`` is that of the clip, derived."""

    layout: Layout
    conditions: CosmosConditions
    branches: list[list[TextKV]]
    start: int = 0
    rope: Rope | None = None


class CosmosTransformer(Transformer):
    """Bidirectional: a whole clip is one chunk, of any length.

    The publication has the network see given frames ``g`` in place of the sample's, and lets the solver carry these
    frames of the sample from the first noise ``n`` to ``g`` along the straight line whose flow is ``n - g``. Here they
    stand in the sample itself (:meth:`stamp`), from the beginning and after every step. The generated frames are the
    same: the network sees the same input both ways, and every solver works on each element by itself, its history
    included, so that nothing of the given frames' flow reaches the others. At the end the given frames are exactly
    ``g``; those of the publication come near it, since its first noise level is a little below 1.
    """

    config: CosmosTransformerConfig
    conditions_type = CosmosConditions
    layouts: ClassVar = {"diffusers": DIT_FROM_DIFFUSERS}

    def __init__(self, config: CosmosTransformerConfig) -> None:
        super().__init__(config)
        check_backend(config.network.attention)
        self.network: CosmosNetwork = config.network.setup()

    @property
    def checkpoint_root(self) -> CosmosNetwork:
        """A checkpoint holds the network's own keys."""
        return self.network

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.network.blocks)

    @property
    def latent_channels(self) -> int:
        return self.config.network.out_dim

    def initialize_cache(self, layout: Layout, conditions: CosmosConditions) -> TransformerCache:
        self._check(conditions, layout)
        return TransformerCache(layout, conditions, self._encode(conditions))

    def set_conditions(self, cache: TransformerCache, conditions: CosmosConditions) -> None:
        self._check(conditions, cache.layout)
        cache.branches, cache.conditions = self._encode(conditions), conditions

    def predict_flow(self, noisy: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> Tensor:
        if cache.start:
            raise ValueError(f"this model makes a clip as one chunk, and {cache.start} latent frames are made")
        batch, _, frames, rows, columns = noisy.shape
        masks = noisy.new_zeros(batch, 2, frames, rows, columns)  # of given frames; of padding, which there never is
        if (given := cache.conditions.image_latent) is not None:
            count = given.shape[2]
            masks[:, 0, :count] = 1
            timestep = self._timestep(timestep, frames, count)
        latent, rope = torch.cat((noisy, masks), dim=1), self._rope(cache, noisy)
        flows: list[Tensor] = []
        for branch in cache.branches:
            copies = branch[0].k.shape[0] // batch
            flow = self.network(_repeat(latent, copies), _repeat(timestep, copies), rope, branch)
            flows += flow.to(noisy.dtype).chunk(copies)
        if len(flows) == 1:
            return flows[0]
        conditional, unconditional = flows
        return unconditional + self.config.guidance_scale * (conditional - unconditional)

    def commit(self, clean: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> None:
        cache.start += clean.shape[2]
        cache.rope = None

    def stamp(self, noisy: Tensor, cache: TransformerCache) -> Tensor:
        given = cache.conditions.image_latent
        if given is None:
            return noisy
        return torch.cat((given.to(noisy), noisy[:, :, given.shape[2] :]), dim=2)

    def _timestep(self, timestep: Tensor, frames: int, given: int) -> Tensor:
        """One per latent frame, that of the given ones their own."""
        if self.config.given_timestep is None:
            return timestep
        timestep = timestep[:, None].repeat(1, frames) if timestep.ndim == 1 else timestep.clone()
        timestep[:, :given] = self.config.given_timestep
        return timestep

    def _rope(self, cache: TransformerCache, like: Tensor) -> Rope:
        if cache.rope is None:
            network, (frames, rows, columns) = self.config.network, like.shape[2:]
            patch = network.patch_size[1]
            angles = rope_angles(
                (frames, rows // patch, columns // patch),
                network.head_dim,
                network.rope_theta,
                network.rope_extrapolation,
            )
            dtype = torch.promote_types(like.dtype, torch.float32)
            cache.rope = Rope(angles.cos().to(dtype), angles.sin().to(dtype)).to(like.device)
        return cache.rope

    def _check(self, conditions: CosmosConditions, layout: Layout) -> None:
        """The given frames are of this rollout's size, and leave something to make."""
        given = conditions.image_latent
        if given is None:
            return
        size = layout.channels, layout.height, layout.width
        if (given.shape[1], *given.shape[3:]) != size:
            raise ValueError(f"given latents are {list(given.shape)}; expected (channels, rows, columns) of {size}")
        frames, most = layout.plan.first_len_t, self.config.max_given_frames
        if not 1 <= given.shape[2] <= min(most, frames - 1):
            raise ValueError(
                f"{given.shape[2]} latent frames are given; this model takes 1 to {most}, and fewer than the {frames} "
                "of the clip"
            )

    def _encode(self, conditions: CosmosConditions) -> list[list[TextKV]]:
        """The text's keys and values of each guidance branch: one branch at scale 0 or 1, else two, or both stacked."""
        text, negative, scale = conditions.text, conditions.negative_text, self.config.guidance_scale
        if scale == 1:
            return [self.network.encode_text(text)]
        if negative is None:
            raise ValueError(f"guidance_scale is {scale}, which needs a negative prompt; none was encoded")
        if scale == 0:
            return [self.network.encode_text(negative)]
        if self.config.cfg == "batched" and text.shape == negative.shape:
            return [self.network.encode_text(torch.cat((text, negative)))]
        # Texts of two lengths cannot be stacked: there is no token that would not be attended.
        return [self.network.encode_text(text), self.network.encode_text(negative)]


def _repeat(value: Tensor, copies: int) -> Tensor:
    return value if copies == 1 else torch.cat([value] * copies)
