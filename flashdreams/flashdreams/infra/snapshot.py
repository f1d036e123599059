"""Save a rollout at a chunk boundary and go on with it elsewhere, bit for bit.

One safetensors file: the tensors of the cache tree, and as metadata the tree's structure and a fingerprint of config,
weights, dtype and versions. No compiled state, no code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdreams._version import __version__
from flashdreams.config import to_yaml
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.noise import GivenNoise, KeyedNoise
from flashdreams.infra.rollout import ControlSource, Rollout, record_controls

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

FORMAT = "flashdreams-rollout-1"


class SnapshotError(ValueError):
    """The file is not a snapshot, or was made by another model, machine setup or version."""


def fingerprint(pipeline: StreamInferencePipeline, loras: Iterable[str] = ()) -> dict[str, str]:
    """What must be the same for a rollout with these LoRAs to go on bit for bit."""
    pipeline.loras.use({})
    trained = pipeline.diffusion_model.weight_version > 0  # so that they are no longer those of any file
    weights = {
        name: (None if trained else digest) or _state_digest(pipeline.get_submodule(_module_path(name)))
        for name, digest in pipeline.checkpoint_digests().items()
    }
    digests = pipeline.loras.digests
    for name in sorted(loras):
        own = {key: digest or "not from a file" for key, digest in digests.items() if key.rpartition(".")[0] == name}
        weights |= {f"lora.{key}": digest for key, digest in own.items()}
    return {
        "config": hashlib.sha256(to_yaml(pipeline.config).encode()).hexdigest(),
        "weights": hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest(),
        "dtype": pipeline.config.diffusion_model.transformer.dtype,
        "approximations": "; ".join(pipeline.acceleration.approximations) if pipeline.acceleration else "",
        "device": pipeline.device.type,
        "torch": torch.__version__,
        "flashdreams": __version__,
    }


def save(rollout: Rollout, path: Path) -> None:
    """Write ``rollout``, which stands at a chunk boundary."""
    cache = rollout.cache
    if cache.driver is not None:
        raise SnapshotError("this rollout samples by a plan, which a snapshot does not hold; save its segment instead")
    tensors: dict[str, Tensor] = {}
    noise = cache.noise
    if isinstance(noise, KeyedNoise):
        noise_state: Any = dataclasses.asdict(noise) | {"seed": str(noise.seed)}
    elif isinstance(noise, GivenNoise):
        steps = [[*key, _keep(value, tensors)] for key, value in noise.steps.items()]
        noise_state = {"frames": _keep(noise.frames, tensors), "steps": steps}
    else:
        raise SnapshotError(f"noise of type {type(noise).__name__} cannot be saved; use KeyedNoise or GivenNoise")
    size = cache.layout.height * _compression(rollout.pipeline), cache.layout.width * _compression(rollout.pipeline)
    state = {
        "format": FORMAT,
        "fingerprint": fingerprint(rollout.pipeline, cache.loras),
        "loras": cache.loras,
        "size": size,
        "plan": dataclasses.asdict(cache.layout.plan),
        "noise": noise_state,
        "conditions": {name: _keep(value, tensors) for name, value in cache.conditions.to_dict().items()},
        "batched": rollout.batched,
        "frame": rollout.frame,
        "cache": _flatten(cache, tensors),
    }
    save_file(tensors, path, metadata={"state": json.dumps(state)})


def resume(
    pipeline: StreamInferencePipeline,
    path: str | Path,
    *,
    num_chunk: int | None = None,
    control: ControlSource = None,
    save_control: str | Path | None = None,
) -> Rollout:
    """Rebuild the rollout saved at ``path``; a different fingerprint is refused, naming what differs."""
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("state", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"cannot read a saved rollout from {path}: {error}") from None
    if state.get("format") != FORMAT:
        raise SnapshotError(f"{path} is not a saved rollout of this version ({FORMAT})")
    loras = state["loras"]
    if absent := [name for name in loras if name not in pipeline.loras.names]:
        raise SnapshotError(f"{path} goes on with the LoRA {absent[0]!r}, which is not loaded; load it under this name")
    want, have = fingerprint(pipeline, loras), state["fingerprint"]
    differs = [f"{name} (saved {have.get(name)}, here {want[name]})" for name in want if have.get(name) != want[name]]
    if differs:
        raise SnapshotError(f"{path} cannot go on here, because of another " + ", ".join(differs))
    noise = state["noise"]
    if "seed" in noise:
        groups = noise.get("group_ids")
        source: Any = KeyedNoise(
            int(noise["seed"]), tuple(noise["sample_ids"]), noise["component"], groups and tuple(groups)
        )
    else:
        source = GivenNoise(tensors[noise["frames"]], {(c, s): tensors[key] for c, s, key in noise["steps"]})
    slots = {name: tensors[key].to(pipeline.device) for name, key in state["conditions"].items()}
    conditions = pipeline.diffusion_model.transformer.conditions_type.from_dict(slots)
    height, width = state["size"]
    cache = pipeline.initialize_cache(conditions=conditions, height=height, width=width, noise=source, loras=loras)
    cache.layout = dataclasses.replace(cache.layout, plan=type(cache.layout.plan)(**state["plan"]))
    _restore(cache, state["cache"], tensors, pipeline.device)
    for expert in cache.experts:
        if hasattr(expert, "layout"):
            expert.layout = cache.layout
    return Rollout(
        pipeline, cache, batched=state["batched"], num_chunk=num_chunk, control=control, first_frame=state["frame"],
        record=record_controls(pipeline, save_control, cache.layout.batch),
    )  # fmt: skip


def _keep(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    key = f"t{len(tensors)}"
    tensors[key] = tensor.detach().cpu().contiguous().clone()
    return key


def _is_node(value: Any) -> bool:
    """Objects whose attributes are state; frozen dataclasses are facts of the rollout, rebuilt from its arguments."""
    if isinstance(value, RollingKVCache):
        return True
    return dataclasses.is_dataclass(value) and not value.__dataclass_params__.frozen


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The structure of a state tree, with keys into ``tensors`` at its leaves."""
    if isinstance(value, Tensor):
        return {"tensor": _keep(value, tensors)}
    if isinstance(value, dict):
        return {"dict": [[key, _flatten(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_flatten(item, tensors) for item in value]}
    if _is_node(value):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        derived = {field.name for field in fields if field.metadata.get("derived")}
        kept = {name: item for name, item in vars(value).items() if name not in derived}
        return {"node": {name: _flatten(item, tensors) for name, item in kept.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    return {"fixed": type(value).__name__}


def _restore(template: Any, state: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The saved value; buffers and objects of ``template`` are filled in place where they exist."""
    kind, content = next(iter(state.items()))
    if kind == "tensor":
        saved = tensors[content].to(device)
        if isinstance(template, Tensor) and template.shape == saved.shape and template.dtype == saved.dtype:
            return template.copy_(saved)
        return saved
    if kind == "dict":
        old = template if isinstance(template, dict) else {}
        return {key: _restore(old.get(key), item, tensors, device) for key, item in content}
    if kind == "list":
        old = list(template) if isinstance(template, (list, tuple)) and len(template) == len(content) else None
        items = [_restore(old[i] if old else None, item, tensors, device) for i, item in enumerate(content)]
        return tuple(items) if isinstance(template, tuple) else items
    if kind == "node":
        for name, item in content.items():
            if "fixed" not in item:
                setattr(template, name, _restore(getattr(template, name), item, tensors, device))
        return template
    return template if kind == "fixed" else content


def _compression(pipeline: StreamInferencePipeline) -> int:
    return pipeline.decoder.spatial_compression if pipeline.decoder else 1


def _module_path(part: str) -> str:
    return part.replace("transformer.", "diffusion_model.experts.")


def _state_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
