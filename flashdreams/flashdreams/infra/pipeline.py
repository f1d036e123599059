"""The whole model: encoders, diffusion model and decoder. Holds weights and config only; state is in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashdreams.core.noise import KeyedNoise, Noise
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.chunk import Lane
from flashdreams.infra.config import PipelineConfig
from flashdreams.infra.images import encode_clip
from flashdreams.infra.layout import Layout
from flashdreams.infra.loras import Loras
from flashdreams.infra.prompts import GivenPrompts, PromptEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from flashdreams.infra.rollout import ControlSource, Rollout


class StreamInferencePipeline(nn.Module):
    """Chunk-by-chunk video from prompts, first frames and live controls.

    Any number of rollouts, of different sizes, may interleave on one pipeline as if each ran alone.

    Args:
        text_encoder: one in use already, or the embeddings of a file; by default the one that ``config`` names.
        home: where the diffusion model's weights are at first, for ``acceleration`` to bring to ``device``.
    """

    def __init__(
        self,
        config: PipelineConfig,
        device: str = "cpu",
        text_encoder: PromptEncoder | GivenPrompts | None = None,
        home: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)
        if text_encoder is None and config.text_encoder is not None:
            text_encoder = PromptEncoder(config.text_encoder, device)
        self.text_encoder = text_encoder
        self.encoder = config.encoder.setup(device=device) if config.encoder else None
        self.image_encoder: Any = config.image_encoder.setup(device=device) if config.image_encoder else None
        self.diffusion_model = config.diffusion_model.setup(device=device, home=home)
        self.decoder: Any = config.decoder.setup(device=device) if config.decoder else None
        self.acceleration: Any = None
        """What was done to the modules so that they run faster, if anything was (``acceleration.apply``)."""
        self.decode_lane: Lane | None = None
        """Where rollouts decode beside the next steps; without, they do so in turn."""
        self.eval().requires_grad_(False)

    @property
    def loras(self) -> Loras:
        """LoRAs that rollouts may use: ``pipeline.loras.load("style", "style.safetensors", weight=0.8)``."""
        return self.diffusion_model.loras

    def checkpoint_digests(self) -> dict[str, str | None]:
        """Digest of each part's weight file; ``None`` for random weights."""
        parts: dict[str, Any] = {"encoder": self.encoder, "decoder": self.decoder}
        if isinstance(self.text_encoder, PromptEncoder):
            parts = {"text_encoder": self.text_encoder, **parts}
        for i, expert in enumerate(self.diffusion_model.experts):
            parts[f"transformer.{i}"] = expert
        return {name: part.checkpoint_digest for name, part in parts.items() if part is not None}

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompt: str | None = None) -> Any:
        """Conditions of a batch of prompts, with the negative prompt's where guidance needs it."""
        if self.text_encoder is None:
            raise ValueError(f"{self.config.name} has no text encoder; give conditions= instead of a prompt")
        negative = self.config.diffusion_model.negative_prompt(negative_prompt)
        slots = self.text_encoder.slots(prompts, negative)
        return self.diffusion_model.transformer.conditions_type.from_dict(slots)

    @torch.no_grad()
    def encode_video(self, video: Tensor) -> Tensor:
        """Latent ``[B, C, T, h, w]`` in float32 of a clip ``[B, 3, 1 + 4n, H, W]`` in [-1, 1]: a first frame, or more
        to go on from (``initial_latents``)."""
        return encode_clip(self, video)

    @torch.no_grad()
    def initialize_cache(
        self,
        prompts: Sequence[str] = (),
        *,
        conditions: Any = None,
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        noise: Noise | None = None,
        seed: int = 0,
        initial_latents: Tensor | None = None,
        slots: Mapping[str, Tensor] | None = None,
        latent_frames: int | None = None,
        loras: Mapping[str, float] | None = None,
    ) -> PipelineCache:
        """State of a new rollout.

        Args:
            prompts: one per sample of the batch; or ``conditions``, already encoded (also as a dict, such as
                :func:`~flashdreams.infra.prompts.load_embeds` reads).
            height, width: pixels, multiples of ``config.size_multiple``; the model's own by default.
            noise: the random source; by default :class:`KeyedNoise` of ``seed`` with sample ids "0", "1", ...
            initial_latents: normalised latents ``[B, C, T, h, w]`` of given first frames; of one sample for all.
            slots: further condition slots, such as those of given images; of one sample for all.
            latent_frames: length of the one chunk of a bidirectional model; its own by default.
            loras: weights of LoRAs by name; those given to ``loras.load`` by default.
        """
        height, width = height or self.config.height, width or self.config.width
        multiple = self.config.size_multiple
        if height % multiple or width % multiple:
            raise ValueError(f"size {height}x{width} is not a multiple of {multiple} in height and width")
        makes = self.diffusion_model.transformer.conditions_type
        if conditions is None and not self.config.diffusion_model.transformer.takes_text:
            slots = {
                name: _for_all(slot, max(1, len(prompts)), name).to(self.device) for name, slot in (slots or {}).items()
            }
            conditions, slots = makes.from_dict(slots), None
        elif conditions is None:
            conditions = self.encode_prompts(prompts, negative_prompt)
        elif isinstance(conditions, Mapping):
            encoded = {name: value.to(self.device) for name, value in conditions.items()}
            conditions = makes.from_dict(encoded)
        batch = next(iter(conditions.to_dict().values())).shape[0]
        if slots:
            alike = {name: _for_all(slot, batch, name).to(self.device) for name, slot in slots.items()}
            conditions = type(conditions).from_dict(conditions.to_dict() | alike)
        compression = self.decoder.spatial_compression if self.decoder else 1
        given = 0 if initial_latents is None else initial_latents.shape[2]
        layout = Layout(
            batch,
            self.diffusion_model.transformer.latent_channels,
            height // compression,
            width // compression,
            self.config.plan(given, latent_frames),
        )
        if initial_latents is not None:
            initial_latents = _for_all(initial_latents, batch, "initial_latents")
            expected = (batch, layout.channels, given, layout.height, layout.width)
            if tuple(initial_latents.shape) != expected:
                raise ValueError(f"initial_latents are {list(initial_latents.shape)}; expected {list(expected)}")
            initial_latents = initial_latents.to(self.device)
        loras = self.loras.check(self.loras.default if loras is None else loras)
        self.loras.use(loras)
        return PipelineCache(
            layout=layout,
            noise=noise or KeyedNoise(seed, tuple(map(str, range(batch)))),
            conditions=conditions,
            experts=self.diffusion_model.initialize_cache(layout, conditions),
            encoder=self.encoder.initialize_cache(layout) if self.encoder else None,
            decoder=self.decoder.initialize_cache() if self.decoder else None,
            given=initial_latents,
            loras=loras,
            recent=self.diffusion_model.recent(),
            weight_version=self.diffusion_model.weight_version,
        )

    @torch.no_grad()
    def generate(self, autoregressive_index: int, cache: PipelineCache, input: Any = None) -> Tensor:
        """Video ``[B, 3, frames, H, W]`` in [-1, 1] of the next chunk (its latent, if there is no decoder)."""
        latent = self.diffusion_model.generate(autoregressive_index, cache, input)
        return self.decode(latent, cache, cache.pending["input"])

    @torch.no_grad()
    def finalize(self, autoregressive_index: int, cache: PipelineCache) -> None:
        """Commit the chunk to the context. Belongs to the gap between chunks, after its frames are handed out."""
        self.diffusion_model.finalize(autoregressive_index, cache)

    @torch.no_grad()
    def decode(self, latent: Tensor, cache: PipelineCache, input: Any = None) -> Tensor:
        """Pixels of the chunk that follows the last decoded one; ``input``: its controls."""
        if self.decoder is None:
            return latent
        latent = latent.to(getattr(torch, self.decoder.config.dtype))
        return self.decoder.decode(latent, cache.decoder, input)

    @torch.no_grad()
    def encode_controls(self, controls: Sequence[Sequence[Any]], chunk: int, cache: PipelineCache) -> Any:
        """The chunk's ``input`` from one :class:`Control` or ``None`` per pixel frame (and of those looked ahead at),
        for each sample."""
        if self.encoder is None:
            return None
        valid = self.encoder.config.takes.validate
        rows = [[valid(control) for control in row] for row in controls]
        return self.encoder.encode(rows, *cache.layout.plan.span(chunk), cache.encoder)

    def rollout(
        self,
        prompt: str | Sequence[str] = "",
        *,
        seed: int = 0,
        num_chunk: int | None = None,
        num_frames: int | None = None,
        negative_prompt: str | None = None,
        conditions: Any = None,
        image: Tensor | None = None,
        last_image: Tensor | None = None,
        clip: Tensor | None = None,
        initial_latents: Tensor | None = None,
        control: ControlSource = None,
        height: int | None = None,
        width: int | None = None,
        save_control: str | Path | None = None,
        noise: Noise | None = None,
        loras: Mapping[str, float] | None = None,
    ) -> Rollout:
        """Stream chunks of video; see :class:`~flashdreams.infra.rollout.Rollout`.

        Args:
            prompt: one, or a batch of them (frames then carry a batch axis).
            num_chunk: how many chunks; ``None`` goes on without end (a bidirectional model makes one).
            num_frames: length in pixel frames instead, rounded up to whole chunks.
            image: first frame, uint8 ``[H, W, 3]`` (or ``[B, H, W, 3]``) of the rollout's size; of any size for models
                that scale it themselves (``config.image_use == "concat"``).
            last_image: last frame, for models that take one.
            clip: first frames to go on from, uint8 ``[1 + 4n, H, W, 3]`` of the rollout's size.
            control: one control per pixel frame, or a function of (start frame, stop frame). What the model takes is
                in ``config.encoder.takes``.
            save_control: write what was consumed, frame by frame, to this file (.jsonl), which ``read_controls`` reads.
            loras: weights of LoRAs by name; those given to ``loras.load`` by default.
        """
        from flashdreams.infra.rollout import start_rollout

        return start_rollout(
            self, prompt, seed=seed, num_chunk=num_chunk, negative_prompt=negative_prompt, conditions=conditions,
            num_frames=num_frames, image=image, last_image=last_image, clip=clip, initial_latents=initial_latents,
            control=control, save_control=save_control, height=height, width=width, noise=noise, loras=loras,
        )  # fmt: skip

    def resume(
        self,
        path: str | Path,
        *,
        num_chunk: int | None = None,
        control: ControlSource = None,
        save_control: str | Path | None = None,
    ) -> Rollout:
        """Go on with a rollout that :meth:`Rollout.save` wrote, bit for bit."""
        from flashdreams.infra.snapshot import resume

        return resume(self, path, num_chunk=num_chunk, control=control, save_control=save_control)


def _for_all(value: Tensor, batch: int, name: str) -> Tensor:
    """``value`` ``[B, ...]``, or that of one sample for all of them."""
    if len(value) not in (1, batch):
        raise ValueError(f"{name} is given for {len(value)} samples; this rollout has {batch} (or give one for all)")
    return value.expand(batch, *value.shape[1:])
