"""Key maps from the other published layouts of the Wan family to the native one, which our modules have.

Each ``*_FROM_*`` is a bijection and can be inverted to export. The functions below them are for configs
(``state_dict_transform="flashdreams.recipes.wan.keymaps:dit_from_diffusers"``); they also take out training wrappers.
"""

from __future__ import annotations

from flashdreams.core.checkpoint.keymap import Drop, Fuse, KeyMap, Reshape, Strip, Transpose

UNWRAP = KeyMap((Strip(),))
"""Takes wrappers out of native keys (the ``generator`` and ``generator_ema`` of Self-Forcing trainers)."""

# Diffusers has a real `net` inside its feed-forwards.
_UNWRAP_DIFFUSERS = KeyMap((Strip.before(["condition_embedder.image_embedder.ff.net.0.proj.weight"]),))

DIT_FROM_DIFFUSERS = KeyMap(
    (
        (r"^condition_embedder\.(text|time)_embedder\.linear_1\.", r"\1_embedding.0."),
        (r"^condition_embedder\.(text|time)_embedder\.linear_2\.", r"\1_embedding.2."),
        (r"^condition_embedder\.time_proj\.", "time_projection.1."),
        (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
        (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
        (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
        (r"^proj_out\.", "head.head."),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.add_(k|v)_proj\.", r".\1_img."),
        (r"\.norm_added_k\.", ".norm_k_img."),
        (r"\.to_(q|k|v)\.", r".\1."),
        (r"\.to_out\.0\.", ".o."),
        # The native block counts its norms in another order than it runs them: the one before cross-attention is 3.
        (r"\.norm2\.", ".norm3."),
        (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
        (r"\.ffn\.net\.2\.", ".ffn.2."),
    )
)
"""Wan2.1 T2V, I2V and FLF2V, Wan2.2 TI2V and both experts of A14B, from ``WanTransformer3DModel``."""

DIT_FROM_FASTVIDEO = KeyMap(
    (
        (r"^patch_embedding\.proj\.", "patch_embedding."),
        (r"^condition_embedder\.text_embedder\.fc_in\.", "text_embedding.0."),
        (r"^condition_embedder\.text_embedder\.fc_out\.", "text_embedding.2."),
        (r"^condition_embedder\.time_embedder\.mlp\.fc_in\.", "time_embedding.0."),
        (r"^condition_embedder\.time_embedder\.mlp\.fc_out\.", "time_embedding.2."),
        (r"^condition_embedder\.time_modulation\.linear\.", "time_projection.1."),
        (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
        (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
        (r"^condition_embedder\.image_embedder\.ff\.fc_in\.", "img_emb.proj.1."),
        (r"^condition_embedder\.image_embedder\.ff\.fc_out\.", "img_emb.proj.3."),
        (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
        (r"^proj_out\.", "head.head."),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
        (r"\.self_attn_residual_norm\.norm\.", ".norm3."),
        (r"^(blocks\.\d+)\.(to_[qkv]|to_out|norm_[qk])\.", r"\1.self_attn.\2."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.add_(k|v)_proj\.", r".\1_img."),
        (r"\.norm_added_k\.", ".norm_k_img."),
        (r"\.to_(q|k|v)\.", r".\1."),
        (r"\.to_out\.", ".o."),
        (r"\.ffn\.fc_in\.", ".ffn.0."),
        (r"\.ffn\.fc_out\.", ".ffn.2."),
    )
)
"""The same models from the names FastVideo uses in memory."""

_RESIDUAL = (
    (r"\.norm1\.gamma$", ".residual.0.gamma"),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.gamma$", ".residual.3.gamma"),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
)
_ENDS = (
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"^(encoder|decoder)\.conv_in\.", r"\1.conv1."),
    (r"^(encoder|decoder)\.norm_out\.", r"\1.head.0."),
    (r"^(encoder|decoder)\.conv_out\.", r"\1.head.2."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
)

VAE21_FROM_DIFFUSERS = KeyMap(
    (
        *_RESIDUAL,
        (r"^encoder\.down_blocks\.", "encoder.downsamples."),
        # The native decoder counts residuals and upsamplers of all levels in one list, four to a level.
        *(
            (rf"^decoder\.up_blocks\.{level}\.resnets\.{layer}\.", f"decoder.upsamples.{4 * level + layer}.")
            for level in range(4)
            for layer in range(3)
        ),
        *(
            (rf"^decoder\.up_blocks\.{level}\.upsamplers\.0\.", f"decoder.upsamples.{4 * level + 3}.")
            for level in range(3)
        ),
        *_ENDS,
    )
)
"""The VAE of Wan2.1, from ``AutoencoderKLWan``."""

VAE22_FROM_DIFFUSERS = KeyMap(
    (
        *_RESIDUAL,
        (r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.", r"encoder.downsamples.\1.downsamples.\2."),
        (r"^encoder\.down_blocks\.(\d+)\.downsampler\.", r"encoder.downsamples.\1.downsamples.2."),
        (r"^decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.", r"decoder.upsamples.\1.upsamples.\2."),
        (r"^decoder\.up_blocks\.(\d+)\.upsampler\.", r"decoder.upsamples.\1.upsamples.3."),
        *_ENDS,
    )
)
"""The VAE of Wan2.2 TI2V-5B, from ``AutoencoderKLWan(is_residual=True)``."""

UMT5_FROM_TRANSFORMERS = KeyMap(
    (
        (r"^shared\.", "token_embedding."),
        (r"^encoder\.final_layer_norm\.", "norm."),
        (r"^encoder\.block\.", "blocks."),
        (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
        (r"\.layer\.0\.SelfAttention\.", ".attn."),
        (r"\.layer\.0\.layer_norm\.", ".norm1."),
        (r"\.layer\.1\.layer_norm\.", ".norm2."),
        (r"\.layer\.1\.DenseReluDense\.wi_0\.", ".ffn.gate.0."),
        (r"\.layer\.1\.DenseReluDense\.wi_1\.", ".ffn.fc1."),
        (r"\.layer\.1\.DenseReluDense\.wo\.", ".ffn.fc2."),
    )
)
"""The umT5 text encoder, from the file of ``UMT5EncoderModel``."""

_QKV = tuple(f"vision_model.*.self_attn.{part}_proj.*" for part in "qkv")
CLIP_FROM_TRANSFORMERS = KeyMap(
    (
        Reshape("vision_model.embeddings.class_embedding", (1280,), (1, 1, 1280)),
        Reshape("vision_model.embeddings.position_embedding.weight", (257, 1280), (1, 257, 1280)),
        Transpose("visual_projection.weight"),
        Fuse(_QKV, "vision_model.*.self_attn.to_qkv.*"),
        (r"^visual_projection\.weight$", "visual.head"),
        (r"^vision_model\.embeddings\.class_embedding$", "visual.cls_embedding"),
        (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.pos_embedding"),
        (r"^vision_model\.embeddings\.patch_embedding\.", "visual.patch_embedding."),
        (r"^vision_model\.pre_layrnorm\.", "visual.pre_norm."),
        (r"^vision_model\.post_layernorm\.", "visual.post_norm."),
        (r"^vision_model\.encoder\.layers\.", "visual.transformer."),
        (r"\.layer_norm(1|2)\.", r".norm\1."),
        (r"\.self_attn\.out_proj\.", ".attn.proj."),
        (r"\.self_attn\.to_qkv\.", ".attn.to_qkv."),
        (r"\.mlp\.fc1\.", ".mlp.0."),
        (r"\.mlp\.fc2\.", ".mlp.2."),
    )
)
"""The visual tower of the CLIP ViT-H/14 of Wan2.1 I2V, from ``CLIPVisionModelWithProjection``."""

CLIP_VISUAL = KeyMap(
    (
        Drop("textual.*", why="the text tower, which no Wan model uses"),
        Drop("log_scale", why="the temperature of CLIP's training"),
    )
)
"""From the published native file, which holds both towers of CLIP."""

dit_from_native = UNWRAP.apply
dit_from_diffusers = _UNWRAP_DIFFUSERS.then(DIT_FROM_DIFFUSERS).apply
dit_from_fastvideo = UNWRAP.then(DIT_FROM_FASTVIDEO).apply
vae21_from_diffusers = VAE21_FROM_DIFFUSERS.apply
vae22_from_diffusers = VAE22_FROM_DIFFUSERS.apply
# The state dict of a CLIPVisionModel of transformers 5 lacks the part that its files have in front.
clip_from_transformers = (
    KeyMap(((r"^(embeddings|pre_layrnorm|encoder|post_layernorm)\.", r"vision_model.\1."),))
    .then(CLIP_FROM_TRANSFORMERS)
    .apply
)
# A state dict taken from the module, not from its file, has the token table twice.
umt5_from_transformers = (
    KeyMap((Drop("encoder.embed_tokens.weight", why="tied to shared.weight"),)).then(UMT5_FROM_TRANSFORMERS).apply
)
