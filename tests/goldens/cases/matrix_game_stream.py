"""Matrix-Game-2: the action module alone, and the whole network, streamed over their caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import rope_3d
from flashdreams.infra.layout import ChunkPlan, Layout
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.network import ChunkContext
from golden import Golden
from matrix_game_2._action import ActionModule, Moment, initialize_cache
from matrix_game_2._encoder import ActionEncoder
from matrix_game_2.config import ActionEncoderConfig, MatrixGame2NetworkConfig


def of_module(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """Every chunk twice, as the original did: a denoising pass and the one that commits."""
    published, inputs = golden.config, golden.inputs
    config = MatrixGame2NetworkConfig(dim=published["img_hidden_size"], **action_fields(published))
    module = ActionModule(config)
    module.load_state_dict(golden.weights["action_module"])
    rows, columns = published["token_rows"], published["token_cols"]
    frames, tokens = published["frames_per_block"], rows * columns
    geometry = CacheGeometry(published["local_attn_size"], 0, tokens)
    cache = initialize_cache(config, geometry, 1, torch.float32, torch.device("cpu"))
    chunks = actions_of_chunks(golden, config, frames)
    for chunk, actions in enumerate(chunks):
        start, stop = chunk * frames, (chunk + 1) * frames
        x = torch.einsum("fkd,sk->fsd", inputs["x_time"][chunk], inputs["x_space"])
        context = ChunkContext(
            rope_3d(range(start, stop), rows, columns, 8), geometry.token_slots(start, stop),
            geometry.visible(stop) * tokens, start=start, shape=(frames, rows, columns),
        )  # fmt: skip
        for _ in range(2):
            prepared = module.prepare(actions["keys"], actions.get("mouse"))
            moment = Moment.of(context, config, torch.float32)
            y = module(x.flatten(0, 1)[None], prepared, moment, cache).view(x.shape)
            yield f"chunk{chunk}_tokens", y[:, published["picked_tokens"]]
            yield f"chunk{chunk}_mean_over_space", y.mean(1)
    yield "keyboard_cache_k", in_time_order(cache.keyboard, stop)
    if cache.mouse is not None:
        yield "mouse_cache_k_token0", in_time_order(cache.mouse, stop)[:1]


def of_network(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """Through the transformer and its caches: each chunk at two timesteps, then committed at the second."""
    published, inputs = golden.config, golden.inputs
    network = MatrixGame2NetworkConfig(
        **{name: published[name] for name in ("dim", "ffn_dim", "freq_dim", "num_heads", "num_layers", "eps")},
        image_dim=published["clip_dim"],
        action_blocks=len(published["action_config"]["blocks"]),
        **action_fields(published["action_config"]),
    )
    frames = published["frames_per_block"]
    transformer = WanTransformerConfig(
        network=network, dtype="float32", len_t=frames, window_size_t=published["local_attn_size"],
        sink_size_t=published["sink_size"], concat_image_mask_to_latent=True,
    ).setup()  # fmt: skip
    transformer.network.load_state_dict(golden.weights["model"])
    given = torch.einsum("cfk,kh,kw->cfhw", inputs["cond_cf"], inputs["cond_h"], inputs["cond_w"])[None]
    noisy = torch.einsum("cfk,kh,kw->cfhw", inputs["x_cf"], inputs["x_h"], inputs["x_w"])[None]
    mask, latent = given.split((4, 16), dim=1)
    layout = Layout(1, 16, published["latent_height"], published["latent_width"], ChunkPlan.of(frames))
    cache = transformer.initialize_cache(
        layout, WanConditions(image_mask=mask, image_latent=latent, image_embed=inputs["visual_context"])
    )
    picked = torch.meshgrid(
        torch.tensor(published["picked_rows"]), torch.tensor(published["picked_cols"]), indexing="ij"
    )
    for chunk, actions in enumerate(actions_of_chunks(golden, network, frames)):
        x = noisy[:, :, chunk * frames : (chunk + 1) * frames]
        for call, timestep in enumerate(inputs["timesteps"]):
            flow = transformer.predict_flow(x, timestep[None], cache, actions)[0]
            yield f"chunk{chunk}_call{call}_picked", flow[:, :, *picked]
            yield f"chunk{chunk}_call{call}_mean", flow.mean((2, 3))
            yield f"chunk{chunk}_call{call}_std", flow.std((2, 3))
        transformer.commit(x, timestep[None], cache, actions)


def action_fields(published: dict[str, Any]) -> dict[str, Any]:
    """Our names for the values of a published ``action_config``."""
    return {
        "action_window": published["windows_size"],
        "action_dim": published["keyboard_hidden_dim"],
        "action_heads": published["heads_num"],
        "action_embed_dim": published["hidden_size"],
        "action_rope_dim": published["rope_dim_list"][0],
        "action_rope_theta": published["rope_theta"],
        "keyboard_dim": published["keyboard_dim_in"],
        "mouse_dim": published["mouse_dim_in"] if published["enable_mouse"] else 0,
    }


def actions_of_chunks(golden: Golden, config: MatrixGame2NetworkConfig, frames: int) -> Iterator[dict[str, Tensor]]:
    """What the streaming encoder makes of the file's rows, chunk by chunk."""
    encoder = ActionEncoder(ActionEncoderConfig(keyboard_dim=config.keyboard_dim, mouse_dim=config.mouse_dim))
    layout = Layout(1, 16, 44, 80, ChunkPlan.of(frames))
    caches = {name: encoder.initialize_cache(layout) for name in ("keyboard", "mouse")}
    start, stop = 0, 1 + 4 * (frames - 1)
    while stop <= golden.inputs["keyboard"].shape[1]:
        names = {"keyboard": "keys", "mouse": "mouse"}
        given = {ours: name for name, ours in names.items() if name in golden.inputs}
        yield {ours: encoder.windows(golden.inputs[name][:, start:stop], caches[name]) for ours, name in given.items()}
        start, stop = stop, stop + 4 * frames


def in_time_order(cache: RollingKVCache, end: int) -> Tensor:
    """Keys of the frames that are visible after ``end`` frames, oldest first."""
    return cache.k[:, [cache.geometry.slot(frame) for frame in range(end - cache.geometry.window, end)]]
