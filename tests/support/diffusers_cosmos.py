"""A small Cosmos-Predict2.5 DiT of diffusers with random weights, and ours with the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from diffusers import Cosmos2_5_PredictBasePipeline, CosmosTransformer3DModel, UniPCMultistepScheduler
from diffusers.models.transformers import transformer_cosmos

from cosmos_predict2._keymaps import dit_from_diffusers
from cosmos_predict2._network import CosmosNetwork
from cosmos_predict2.config import CosmosNetworkConfig
from diffusers_wan import VAE21, vaes
from float64 import randomize

NETWORK = CosmosNetworkConfig(
    dim=40, num_heads=2, num_layers=2, ffn_dim=160, in_dim=6, out_dim=4, text_dim=12, context_dim=10, adaln_dim=8,
    qk_eps=1e-5,
)  # fmt: skip
"""Its head width 20 gives time 8 channels of the rotary embedding, rows and columns 6 each. The epsilon is theirs."""


def _resize(image: Any, size: list[int], interpolation: str) -> Any:
    assert interpolation == "nearest"
    return F.interpolate(image, size, mode="nearest")


if not hasattr(transformer_cosmos, "transforms"):  # of torchvision, for the one thing that the model does with it
    transformer_cosmos.transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )


def their_dit(config: CosmosNetworkConfig = NETWORK, seed: int = 0) -> CosmosTransformer3DModel:
    """In float64, with the settings of Cosmos-Predict2.5."""
    dit = CosmosTransformer3DModel(
        in_channels=config.in_dim - 1,  # it counts the mask of padding by itself
        out_channels=config.out_dim,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        num_layers=config.num_layers,
        mlp_ratio=config.ffn_dim / config.dim,
        text_embed_dim=config.context_dim,
        adaln_lora_dim=config.adaln_dim,
        patch_size=config.patch_size,
        rope_scale=config.rope_extrapolation,
        concat_padding_mask=True,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=config.text_dim,
        encoder_hidden_states_channels=config.context_dim,
    )
    dit.eval().double()
    randomize(dit, seed)
    return dit


def our_dit(theirs: CosmosTransformer3DModel, config: CosmosNetworkConfig = NETWORK) -> CosmosNetwork:
    """With the weights of ``theirs``, as a checkpoint in its layout is loaded."""
    network = config.setup().double()
    network.load_state_dict(dit_from_diffusers(theirs.state_dict()))
    return network


SHIFT = 5.0


class UniPC(UniPCMultistepScheduler):
    """Coefficients from the float32 table, in float64."""

    def set_timesteps(self, *args: Any, **options: Any) -> None:
        super().set_timesteps(*args, **options)
        self.sigmas = self.sigmas.double()


class NoGuard:
    """Where the pipeline has a safety checker; nothing here is text or picture that it could judge."""

    def to(self, device: Any) -> NoGuard:
        return self


def their_pipeline() -> Any:
    """In float64, with no text encoder."""
    pipeline = Cosmos2_5_PredictBasePipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=their_dit(),
        vae=vaes(VAE21)[1],
        scheduler=UniPC(flow_shift=SHIFT, prediction_type="flow_prediction", use_flow_sigmas=True),
        safety_checker=NoGuard(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
