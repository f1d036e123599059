"""Small models of diffusers' Wan family with random weights, and ours with the same weights."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, WanTransformer3DModel

from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.keymaps import dit_from_diffusers, vae21_from_diffusers, vae22_from_diffusers
from flashdreams.recipes.wan.network import WanNetwork
from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig
from float64 import Float64, randomize

SIZES = {"dim": 40, "ffn_dim": 56, "num_heads": 2, "num_layers": 2, "out_dim": 4, "text_dim": 12, "freq_dim": 16}
"""Of a small DiT: its head width 20 gives time 8 channels of the rotary embedding, rows and columns 6 each."""

T2V = WanNetworkConfig(in_dim=4, **SIZES)
I2V = WanNetworkConfig(in_dim=12, image_dim=10, image_tokens=5, **SIZES)
FLF2V = WanNetworkConfig(in_dim=12, image_dim=10, image_tokens=10, image_positions=True, **SIZES)
A14B_I2V = WanNetworkConfig(in_dim=12, **SIZES)
"""Wan2.2: images as channels, no tokens of them."""

_STATISTICS = {"latents_mean": (0.1, -0.2, 0.3, 0.0), "latents_std": (1.5, 0.6, 2.1, 1.0)}
VAE21 = WanVAEConfig(dim=8, z_dim=4, dtype="float64", **_STATISTICS)
VAE22 = WanVAE22Config(dim=8, decoder_dim=4, z_dim=4, dtype="float64", **_STATISTICS)


def their_dit(config: WanNetworkConfig, seed: int = 0) -> WanTransformer3DModel:
    """In float64; its rotary tables too, if it is built in :class:`Float64`."""
    dit = WanTransformer3DModel(
        patch_size=config.patch_size,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.in_dim,
        out_channels=config.out_dim,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        eps=config.eps,
        image_dim=config.image_dim,
        added_kv_proj_dim=config.dim if config.image_dim is not None else None,
        pos_embed_seq_len=config.image_tokens if config.image_positions else None,
    )
    dit.eval().double()
    randomize(dit, seed)
    return dit


def our_dit(config: WanNetworkConfig, theirs: WanTransformer3DModel) -> WanNetwork:
    """With the weights of ``theirs``, as a checkpoint in its layout is loaded."""
    network = config.setup().double()
    network.load_state_dict(dit_from_diffusers(theirs.state_dict()))
    return network


def vaes(config: WanVAEConfig, seed: int = 0) -> tuple[WanVAE, AutoencoderKLWan]:
    """Ours and theirs, in float64."""
    residual = isinstance(config, WanVAE22Config)
    more = {
        "decoder_base_dim": config.decoder_dim, "is_residual": True, "patch_size": config.patch_size,
        "in_channels": 12, "out_channels": 12, "scale_factor_spatial": config.spatial_compression,
    } if residual else {}  # fmt: skip
    with Float64():
        theirs = AutoencoderKLWan(
            base_dim=config.dim,
            z_dim=config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_downsample=list(config.temporal_downsample),
            latents_mean=list(config.latents_mean),
            latents_std=list(config.latents_std),
            **more,
        ).eval()
    randomize(theirs, seed)
    theirs.decoder.conv_out.weight.data.div_(8)  # pixels within [-1, 1], so that clamping hides nothing
    ours: WanVAE = config.setup().requires_grad_(True)
    rename = vae22_from_diffusers if residual else vae21_from_diffusers
    ours.load_state_dict(rename(theirs.state_dict()))
    return ours, theirs
