"""A model of a few tensors, and files that hold its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flashdreams.core.checkpoint.meta import parameters_on_meta


class SmallModel(nn.Module):
    """Two layers, a persistent and a non-persistent buffer, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.mask = [torch.ones(2, dtype=torch.bool)]


class ConfiguredModel(SmallModel):
    """The same, made as the runtime makes modules."""

    def __init__(self, config: object) -> None:
        super().__init__()


class ForgetfulModel(ConfiguredModel):
    """Keeps a tensor that it computes from a weight when it is made."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.rows = (self.a.weight.detach()[:2],)


def meta_model() -> SmallModel:
    with parameters_on_meta():
        return SmallModel()


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) if value.is_floating_point() else torch.tensor([3, 4])
        for key, value in meta_model().state_dict().items()
    }


def save_shards(folder: Path, state: dict[str, Tensor], count: int = 2, stem: str = "model") -> list[Path]:
    """``state`` in ``count`` safetensors files with their index."""
    import json

    keys, table, paths = list(state), {}, []
    for number in range(count):
        name = f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {key: state[key] for key in keys[number::count]}
        save_file(part, folder / name)
        table |= dict.fromkeys(part, name)
        paths.append(folder / name)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return paths


def same(module: nn.Module, state: dict[str, Tensor]) -> bool:
    """Whether ``module`` holds exactly ``state``."""
    held = module.state_dict()
    return held.keys() == state.keys() and all(torch.equal(held[key], value) for key, value in state.items())


def untouched(module: nn.Module) -> bool:
    """Whether a module built by :func:`meta_model` is as it was built."""
    return all(parameter.is_meta for parameter in module.parameters()) and not module.count.any()
