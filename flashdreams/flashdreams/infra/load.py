"""``load_pipeline``: from a slug to a model that runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from flashdreams.config import InstantiateConfig, derive_config, import_object, nested_configs
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.config import DType, PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.number_formats import say_slow_formats
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.plugins.registry import get_runner

C = TypeVar("C", bound=InstantiateConfig)


def resolve_device(name: str) -> str:
    """``auto`` is the best device there is; a device that is not there is a :class:`UserError`."""
    mps = torch.backends.mps.is_available()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdecimal()):
        raise UserError(f"device is {name!r}; expected auto, cpu, cuda, cuda:<number> or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but PyTorch sees no CUDA GPU here; use --device cpu or --device auto")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA GPUs here, from cuda:0")
    if kind == "mps" and not mps:
        raise UserError("device is 'mps', which PyTorch does not offer here; use --device cpu")
    return name


def load_pipeline(
    model: str | PipelineConfig,
    *,
    device: str = "auto",
    dtype: DType | None = None,
    acceleration: AccelerationConfig | None = None,
) -> StreamInferencePipeline:
    """The pipeline of a slug (see ``flashdreams list``), or of a config, with its weights, ready to roll out.

    Args:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:0``, ``mps``.
        dtype: number format of the transformer; the model's own by default.
        acceleration: compilation and the like; the defaults of :class:`AccelerationConfig` if not given.
    """
    config = get_runner(model).pipeline if isinstance(model, str) else model
    if dtype is not None:
        experts = tuple(derive_config(e, transformer={"dtype": dtype}) for e in config.diffusion_model.high_noise)
        changes = {"transformer": {"dtype": dtype}, "high_noise": experts}
        config = derive_config(config, diffusion_model=changes)
    acceleration = acceleration or AccelerationConfig()
    device = resolve_device(device)
    say_slow_formats(config, device)
    with compile_ahead(config, acceleration, device) as ahead:
        pipeline = config.setup(device=device, home=acceleration.home)
        accelerate(pipeline, acceleration, ahead)
    return pipeline


@contextmanager
def compile_ahead(
    config: PipelineConfig, acceleration: AccelerationConfig, device: str, **request: Any
) -> Generator[Any]:
    """Compile for ``config`` while its weights are read within the block, where ``acceleration`` wants and allows it;
    gives what :func:`accelerate` takes.

    Args:
        request: ``height``, ``width`` and ``num_frames`` of the rollouts to come; the model's own by default.
    """
    acceleration.validate()
    ahead = import_object(acceleration.ahead)(config, acceleration, device, **request)
    try:
        yield ahead
    except BaseException:
        if ahead is not None:
            ahead.abandon()
        raise


def accelerate(pipeline: StreamInferencePipeline, config: AccelerationConfig, ahead: Any = None) -> list[str]:
    """Do to ``pipeline``, which has its weights, what ``config`` asks for; returns what was done, for people."""
    config.validate()
    return import_object(config.entry)(pipeline, config, ahead)


def with_checkpoints_from(config: C, source: str) -> C:
    """``config`` with ``source`` in place of every checkpoint that its tree names."""
    changes = {}
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if isinstance(value, InstantiateConfig):
            changes[name] = with_checkpoints_from(value, source)
        elif isinstance(value, tuple) and any(isinstance(item, InstantiateConfig) for item in value):
            changes[name] = tuple(with_checkpoints_from(item, source) for item in value)
    if getattr(config, "checkpoint_path", None) is not None:
        changes["checkpoint_path"] = source
    return replace(config, **changes)


def checkpoints_of(config: InstantiateConfig) -> list[str]:
    """Every checkpoint that stands in a config tree."""
    own = getattr(config, "checkpoint_path", None)
    return ([own] if own else []) + [path for child in nested_configs(config) for path in checkpoints_of(child)]
