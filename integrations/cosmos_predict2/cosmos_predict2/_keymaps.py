"""Key maps from the published layouts of Cosmos-Predict2.5 to our modules.

Ours are the native names. Those of diffusers are a bijection of them and can be inverted to export; the native files
have a prefix and seven buffers besides.
"""

from __future__ import annotations

from flashdreams.core.checkpoint.keymap import Drop, KeyMap, Strip

DIT_FROM_DIFFUSERS = KeyMap(
    (
        (r"^patch_embed\.proj\.", "x_embedder.proj.1."),
        (r"^time_embed\.t_embedder\.", "t_embedder.1."),
        (r"^time_embed\.norm\.", "t_embedding_norm."),
        (r"^norm_out\.linear_(1|2)\.", r"final_layer.adaln_modulation.\1."),
        (r"^proj_out\.", "final_layer.linear."),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.norm1\.linear_(1|2)\.", r".adaln_modulation_self_attn.\1."),
        (r"\.norm2\.linear_(1|2)\.", r".adaln_modulation_cross_attn.\1."),
        (r"\.norm3\.linear_(1|2)\.", r".adaln_modulation_mlp.\1."),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_(q|k|v)\.", r".\1_proj."),
        (r"\.to_out\.0\.", ".output_proj."),
        (r"\.norm_(q|k)\.", r".\1_norm."),
        (r"\.ff\.net\.0\.proj\.", ".mlp.layer1."),
        (r"\.ff\.net\.2\.", ".mlp.layer2."),
    )
)
"""The DiT, from ``CosmosTransformer3DModel``."""

DIT_FROM_NATIVE = KeyMap(
    (
        Strip(),
        Drop("accum_*", why="counters of training"),
        Drop("pos_embedder.*", why="tables of the rotary positions, computed here"),
    )
)
"""The DiT, from the native file, whose keys begin with ``net.``."""

# Diffusers has a real `net` inside its feed-forwards.
_UNWRAP_DIFFUSERS = KeyMap((Strip.before(["transformer_blocks.0.ff.net.0.proj.weight"]),))

TEXT_FROM_TRANSFORMERS = KeyMap(
    (
        Drop("lm_head.weight", why="the text encoder predicts no words"),
        Drop("visual.*", why="the vision tower; prompts are text alone"),
        Drop("model.visual.*", why="the vision tower; prompts are text alone"),
        (r"^model\.(?:language_model\.)?", ""),
    )
)
"""The language model, from the files of ``Qwen2_5_VLForConditionalGeneration`` of transformers 4 and 5."""

dit_from_native = DIT_FROM_NATIVE.apply
dit_from_diffusers = _UNWRAP_DIFFUSERS.then(DIT_FROM_DIFFUSERS).apply
text_from_transformers = TEXT_FROM_TRANSFORMERS.apply
