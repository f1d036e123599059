"""What a trainer outside of this package asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


@dataclass(frozen=True)
class TrainerFacts:
    """Facts of one pipeline, for sharding, adapters and the exchange of weights."""

    trainable_modules: dict[str, nn.Module]
    """What is trained, by the prefix that its parameters have in ``pipeline.state_dict()``: one module per expert, that
    of the highest noise first. A weight update must reach each."""
    no_split_modules: tuple[str, ...]
    """Names of the classes of repeated blocks, which sharding takes as wholes."""
    lora_targets: tuple[str, ...]
    """Ends of the names of the linear layers that adapters go into."""
    latent_shape: tuple[int, int, int, int]
    """``[C, T, H, W]`` of a chunk after the first, at the model's own size."""

    @property
    def trainable_module(self) -> nn.Module:
        """The one that is trained.

        Raises:
            ValueError: there are several.
        """
        if len(self.trainable_modules) > 1:
            raise ValueError(f"this model has {len(self.trainable_modules)} experts; train each of trainable_modules")
        return next(iter(self.trainable_modules.values()))

    @property
    def weight_sync_prefix(self) -> str:
        """That of the one module's parameters; likewise."""
        only = self.trainable_module
        return next(prefix for prefix, module in self.trainable_modules.items() if module is only)


def trainer_facts(pipeline: StreamInferencePipeline) -> TrainerFacts:
    """The facts of ``pipeline``."""
    experts: Any = list(pipeline.diffusion_model.experts)
    names = {id(module): name for name, module in pipeline.named_modules()}
    roots = [getattr(expert, "checkpoint_root", expert) for expert in experts]
    blocks = [type(block).__name__ for expert in experts for block in expert.blocks]
    config, compression = pipeline.config, pipeline.decoder.spatial_compression if pipeline.decoder else 1
    transformer = pipeline.diffusion_model.transformer
    return TrainerFacts(
        {f"{names[id(root)]}.": root for root in roots},
        tuple(dict.fromkeys(blocks)),
        transformer.lora_targets,
        (
            transformer.latent_channels, config.diffusion_model.transformer.len_t,
            config.height // compression, config.width // compression,
        ),
    )  # fmt: skip
