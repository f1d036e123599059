"""Published models that the recipes can build, as runners, and whose the manifests in ``tests/checkpoint/data`` are.

``MANIFESTS`` maps the name of a manifest to (slug, part of the pipeline).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from flashdreams.config import derive_config
from flashdreams.infra.config import DecoderConfig, PipelineConfig, RunnerConfig
from flashdreams.recipes.taehv.config import TAEHVConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig

T2V_1B = WanNetworkConfig()
TI2V_5B = WanNetworkConfig(dim=3072, ffn_dim=14336, num_heads=24, in_dim=48, out_dim=48)
T2V_14B = WanNetworkConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
I2V_A14B = replace(T2V_14B, in_dim=36)
I2V_14B = replace(I2V_A14B, image_dim=1280)
FLF2V_14B = replace(I2V_14B, image_tokens=514, image_positions=True)

NETWORKS = {
    "t2v-1.3b": (
        T2V_1B,
        ["wan2.1-t2v-1.3b.native", "wan2.1-t2v-1.3b.diffusers", "fastvideo-internal.wan2.1-t2v-1.3b",
         "self-forcing.causalwan-1.3b.inner", "self-forcing.generator", "self-forcing.generator_ema-fsdp-1.3b",
         "flashvsr.dit"],
    ),
    "ti2v-5b": (
        TI2V_5B,
        ["wan2.2-ti2v-5b.native", "wan2.2-ti2v-5b.diffusers", "fastvideo-internal.wan2.2-ti2v-5b",
         "longlive2.causalwan-5b.inner", "longlive2.generator"],
    ),
    "t2v-14b": (
        T2V_14B,
        ["wan2.1-t2v-14b.native", "wan2.1-t2v-14b.diffusers", "krea-realtime-14b.file",
         "self-forcing.generator_ema-fsdp-14b", "fastvideo-internal.wan2.2-t2v-a14b.transformer",
         "fastvideo-causalwan2.2-i2v-a14b-preview.transformer.diffusers",
         "fastvideo-causalwan2.2-i2v-a14b-preview.transformer_2.diffusers",
         *(f"wan2.2-t2v-a14b.{part}" for part in ("high_noise_model.native", "low_noise_model.native",
                                                  "transformer.diffusers", "transformer_2.diffusers"))],
    ),
    "i2v-a14b": (
        I2V_A14B,
        ["fastvideo-internal.wan2.2-i2v-a14b.transformer",
         *(f"wan2.2-i2v-a14b.{part}" for part in ("high_noise_model.native", "low_noise_model.native",
                                                  "transformer.diffusers", "transformer_2.diffusers"))],
    ),
    "i2v-14b": (
        I2V_14B,
        ["fastvideo-internal.wan2.1-i2v-14b-480p",
         *(f"wan2.1-i2v-14b-{size}.{layout}" for size in ("480p", "720p") for layout in ("native", "diffusers"))],
    ),
    "flf2v-14b": (FLF2V_14B, ["wan2.1-flf2v-14b-720p.native", "wan2.1-flf2v-14b-720p.diffusers"]),
}  # fmt: skip
DECODERS: dict[str, tuple[DecoderConfig, list[str]]] = {
    "vae21": (WanVAEConfig(), ["wan2.1-vae.native", "wan2.1-vae.diffusers"]),
    "vae22": (WanVAE22Config(), ["wan2.2-vae.native", "wan2.2-vae.diffusers"]),
    # These have the same layers; what they mean, the file name decides.
    "taew2-1": (TAEHVConfig(), ["taew2_1", "taehv", "taecvx", "taeos1_3"]),
    "taew2-2": (TAEHVConfig(latent_channels=48, patch_size=2), ["taew2_2"]),
    "taew2-2-super": (TAEHVConfig(latent_channels=48, patch_size=2, layout="super"), ["taew2_2_super"]),
    "taehv1-5": (TAEHVConfig(latent_channels=32, patch_size=2), ["taehv1_5"]),
    "taeh3": (TAEHVConfig(latent_channels=24, patch_size=2), ["taeh3"]),
    "taehv1-5-super": (TAEHVConfig(latent_channels=32, patch_size=2, layout="super"), ["taehv1_5_super"]),
    "taeltx-2": (
        TAEHVConfig(latent_channels=128, patch_size=4, encoder_time=(2, 2, 2), decoder_time=(2, 2, 2)), ["taeltx_2"],
    ),
}  # fmt: skip
TEXT = ["umt5-xxl-encoder.native", "umt5-xxl-encoder.transformers", "umt5-xxl-encoder.transformers-saved"]
IMAGE = [
    "clip-xlmr-vit-h14-full.native", "clip-xlmr-vit-h14-visual.native", "clip-vit-h14-vision.transformers",
    "clip-vit-h14-vision.transformers4", "clip-vit-h14-vision-proj.transformers",
    "clip-vit-h14-vision-proj.transformers4",
]  # fmt: skip


def _runner(name: str, pipeline: PipelineConfig) -> RunnerConfig:
    return RunnerConfig(runner_name=name, description=name, pipeline=derive_config(pipeline, name=name))


def _dit(network: WanNetworkConfig) -> PipelineConfig:
    model = derive_config(PIPELINE_TEMPLATE.diffusion_model, transformer=WanTransformerConfig(network=network))
    return derive_config(PIPELINE_TEMPLATE, diffusion_model=model, text_encoder=None, encoder=None)


RUNNERS = {name: _runner(name, _dit(network)) for name, (network, _) in NETWORKS.items()}
RUNNERS |= {
    name: _runner(name, derive_config(_dit(T2V_1B), decoder=decoder)) for name, (decoder, _) in DECODERS.items()
}
RUNNERS["encoders"] = _runner(
    "encoders", derive_config(_dit(I2V_14B), text_encoder=UMT5Config(), image_encoder=CLIPVisionConfig())
)
for _name, _config in RUNNERS.items():  # one attribute each, which a plugin in development can name
    setattr(sys.modules[__name__], "R_" + _name.replace("-", "_").replace(".", "_"), _config)
PLUGINS = {name: "published_models:R_" + name.replace("-", "_").replace(".", "_") for name in RUNNERS}

MANIFESTS: dict[str, tuple[str, str]] = {
    **{manifest: (name, "transformer") for name, (_, manifests) in NETWORKS.items() for manifest in manifests},
    **{manifest: (name, "decoder") for name, (_, manifests) in DECODERS.items() for manifest in manifests},
    **dict.fromkeys(TEXT, ("encoders", "text_encoder")),
    **dict.fromkeys(IMAGE, ("encoders", "image_encoder")),
}
