"""The checks of ``flashdreams doctor`` that are about the machine: versions, devices, attention, cache folders.

Each gives (name, what was found) or (name, what was found, advice). Torch is imported inside.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashdreams._version import __version__
from flashdreams.core.caches import VARIABLE, is_writable

_LOW = 5 * 10**9
"""Bytes; below this a folder that downloads go to is called short of space."""


def versions() -> Iterator[tuple[str, ...]]:
    """Python, flashdreams, and what it requires."""
    from packaging.requirements import Requirement

    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "flashdreams", __version__
    try:
        required = importlib.metadata.requires("flashdreams") or []
    except importlib.metadata.PackageNotFoundError:
        yield "installation", "imported from a folder, not installed", "run `pip install -e` on that folder"
        return
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        asked = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement.name, "not installed", f"pip install '{asked}'"
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, version
        else:
            yield requirement.name, f"{version}, but {asked} is needed", f"pip install '{asked}'"


def devices() -> Iterator[tuple[str, ...]]:
    """CPU, CUDA and MPS devices that PyTorch can use."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cpu", f"{cores} cores, {torch.get_num_threads()} threads used by PyTorch{_memory()}"
    for i in range(torch.cuda.device_count()):
        name, properties = f"cuda:{i}", torch.cuda.get_device_properties(i)
        kind = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        try:
            free, total = torch.cuda.mem_get_info(i)
            torch.ones(2, device=name).sum().item()
            yield name, f"{kind}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        except RuntimeError as error:
            what = str(error).splitlines()[0][:120]
            yield name, f"{kind}: {what}", "free it, or install a PyTorch built for it (pytorch.org)"
    if not torch.cuda.is_available() and os.path.exists("/dev/nvidia0"):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield (
            "cuda",
            f"there is an NVIDIA GPU, but PyTorch ({built}) does not see it",
            ("install the CUDA build of PyTorch (pytorch.org), or a driver that is new enough for it"),
        )
    if torch.backends.mps.is_available():
        yield "mps", "Apple GPU"


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return f", {int(lines['MemAvailable'].split()[0]) / 2**20:.1f} GiB of memory free"
    except (OSError, KeyError, ValueError):
        return ""


def attention() -> Iterator[tuple[str, ...]]:
    """Every backend against the float64 reference, on every kind of device it is for."""
    import torch

    from flashdreams.core.attention import BACKENDS, self_test

    for backend in BACKENDS:
        for device, dtype in _places():
            if backend == "flash_attn" and (device, dtype) != ("cuda", torch.bfloat16):
                continue
            name = f"{backend}, {device}, {str(dtype).removeprefix('torch.')}"
            try:
                yield name, f"right, error {self_test(backend, device, dtype):.1e}"
            except (RuntimeError, ImportError, ValueError) as error:
                what = " ".join(str(error).split())[:200]
                other = "sdpa" if backend != "sdpa" else "reference"
                yield name, what, f"use another backend (network.attention={other}), and update PyTorch or the package"


def block_sparse() -> Iterator[tuple[str, ...]]:
    """Every block-sparse backend, likewise; of one that works nowhere here, what it lacks."""
    from flashdreams.core.attention import BLOCK_SPARSE_BACKENDS, block_sparse_self_test
    from flashdreams.core.attention.block_sparse_choice import Use, choose, lacks

    for backend in BLOCK_SPARSE_BACKENDS:
        if backend == "flex_eager":  # nobody is given it who does not ask for it
            continue
        works, needed = [], ""
        for device, dtype in _places():
            needed = lacks(backend, Use(device, dtype, head_dim=64))
            if not needed and (backend, device) != ("flex", "cpu"):
                works.append((device, dtype))
        if not works:
            yield backend, f"needs {needed}" if needed else "not tried: it is not used on a CPU"
        for device, dtype in works:
            name = f"{backend}, {device}, {str(dtype).removeprefix('torch.')}"
            try:
                yield name, f"right, error {block_sparse_self_test(backend, device, dtype):.1e}"
            except Exception as error:  # a compiler or a foreign kernel may fail in any way
                what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                yield name, what, "update PyTorch or the package; until then models with sparse attention may fail here"
    for device, dtype in _places():
        chosen, _ = choose(Use(device, dtype))
        yield f"chosen, {device}, {str(dtype).removeprefix('torch.')}", chosen


def _places() -> list[tuple[str, Any]]:
    """Kinds of devices there are here, with the precisions that attention is tried in."""
    import torch

    places = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
    if torch.cuda.is_available():
        places += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
    if torch.backends.mps.is_available():
        places.append(("mps", torch.float32))
    return places


def caches() -> Iterator[tuple[str, ...]]:
    """The folders that caches go to: whether they can be written, and how much is free."""
    from huggingface_hub import constants

    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield _folder("flashdreams", Path(os.environ.get(VARIABLE) or os.path.join(home, "flashdreams")), VARIABLE)
    yield _folder("hub downloads", Path(constants.HF_HUB_CACHE), "HF_HOME", low=_LOW)
    yield _folder("temporary", Path(tempfile.gettempdir()), "TMPDIR")
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if compiled:
        yield _folder("compiled code", Path(compiled), "TORCHINDUCTOR_CACHE_DIR")
        return
    try:
        yield "compiled code", str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    except (KeyError, OSError, ImportError):  # what getpass raises differs between versions of Python
        yield (
            "compiled code",
            "this user id has no name, and compilers name their cache after the user",
            ("set TORCHINDUCTOR_CACHE_DIR to a folder that can be written, or USER to any name"),
        )


def _folder(name: str, path: Path, variable: str, low: int = 10**8) -> tuple[str, ...]:
    if not is_writable(path):
        return (
            name,
            f"{path} cannot be written; runs use a temporary folder instead",
            (f"set {variable} to a folder that can be written"),
        )
    free = shutil.disk_usage(path).free
    text = f"{path}, {free / 1e9:.1f} GB free"
    if free < low:
        return name, text, f"free some space, or set {variable} to a folder on a larger disk"
    return name, text
