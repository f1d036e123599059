"""One forward pass of the Cosmos-Predict2.5 DiT, with the numbers of the original and of diffusers.

The two differ in the epsilon of the norm of queries and keys alone. Each is loaded by the key map of its layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2._keymaps import DIT_FROM_DIFFUSERS, dit_from_diffusers, dit_from_native
from cosmos_predict2._rope import rope_angles
from cosmos_predict2.config import CosmosNetworkConfig
from flashdreams.core.rope import Rope
from golden import Golden


def velocities(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    weights = golden.weights["model"]
    native = {f"net.{key}": value for key, value in weights.items()} | {"net.accum_iteration": torch.zeros(())}
    yield "velocity_native", velocity(golden, 1e-6, dit_from_native(native))
    yield "velocity_diffusers", velocity(golden, 1e-5, dit_from_diffusers(DIT_FROM_DIFFUSERS.inverse().apply(weights)))


def velocity(golden: Golden, qk_eps: float, state: dict[str, Tensor]) -> Tensor:
    config = network_config(golden.config, qk_eps)
    network = config.setup()
    network.load_state_dict(state)
    x = golden.inputs["latents"]
    frames, rows, columns = x.shape[2:]
    padding = F.interpolate(golden.inputs["padding_mask"], (rows, columns), mode="nearest")
    padding = padding[:, :, None].expand(-1, -1, frames, -1, -1)
    latent = torch.cat((x, golden.inputs["condition_mask"], padding), dim=1)
    timestep = golden.inputs["timestep"]
    if golden.config["per_frame_timestep"]:
        timestep = timestep[None]
    angles = rope_angles(
        (frames, rows // 2, columns // 2), config.head_dim, config.rope_theta, config.rope_extrapolation
    )
    rope = Rope(angles.cos().float(), angles.sin().float())
    return network(latent, timestep, rope, network.encode_text(golden.inputs["text"]))


def network_config(published: dict[str, Any], qk_eps: float) -> CosmosNetworkConfig:
    """Our config with the values of the published ones."""
    native = published["native_config"]
    dim = native["model_channels"]
    return CosmosNetworkConfig(
        dim=dim,
        num_heads=native["num_heads"],
        num_layers=native["num_blocks"],
        ffn_dim=int(dim * native["mlp_ratio"]),
        in_dim=native["in_channels"] + 2,
        out_dim=native["out_channels"],
        text_dim=native["crossattn_proj_in_channels"],
        context_dim=native["crossattn_emb_channels"],
        adaln_dim=native["adaln_lora_dim"],
        qk_eps=qk_eps,
        rope_extrapolation=tuple(native[f"rope_{axis}_extrapolation_ratio"] for axis in "thw"),
        timestep_scale=native["timestep_scale"],
    )
