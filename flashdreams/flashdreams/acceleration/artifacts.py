"""Compiled code that outlives its process: a file per set of shapes, taken up at the next start.

A file is one line of JSON (what it was made with, a digest of the rest), calls that are made without the compiler
(:mod:`~flashdreams.acceleration.kept_calls`), what ``torch.compiler.save_cache_artifacts`` gives, and the libraries of
CPU kernels. PyTorch looks its entries up by their content, so that one that does not fit costs time and changes
nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashdreams._version import __version__
from flashdreams.acceleration import native
from flashdreams.acceleration.call_notes import Told
from flashdreams.acceleration.kept_calls import KeptCalls, is_current, name_of_call, of_kind
from flashdreams.config import to_dict
from flashdreams.core.caches import cache_folder, is_writable
from flashdreams.core.notices import say_once
from flashdreams.infra.config import PipelineConfig

COMPILER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SUFFIX = ".compiled"
MAX_FILE = 512 * 2**20
"""Bytes; what is larger is not kept."""
MAX_FOLDER = 2 * 2**30
"""Bytes; beyond it the files not used for the longest time are removed."""

_NO_CODE = ("checkpoint_path", "state_dict_transform", "transforms", "allow_missing", "negative_prompt")
"""Fields on which compiled code does not depend."""


def identity(config: PipelineConfig, device: torch.device) -> dict[str, Any]:
    """What compiled code depends on besides sizes and batch: versions, the machine's kind, and the network."""
    model = config.diffusion_model
    parts = [model.transformer, *(expert.transformer for expert in model.high_noise), config.decoder]
    network = json.dumps([None if part is None else _code_of(to_dict(part)) for part in parts], sort_keys=True)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "flashdreams": __version__,
        "machine": f"{platform.system()}-{platform.machine()}",
        "device": _kind_of(device),
        "network": hashlib.sha256(network.encode()).hexdigest(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if _is_setting(name)},
    }


def _is_setting(name: str) -> bool:
    """Whether PyTorch's compiler takes a variable as one of its settings."""
    return name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE")) and name != COMPILER_VARIABLE


def _code_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _code_of(item) for name, item in value.items() if name not in _NO_CODE}
    return [_code_of(item) for item in value] if isinstance(value, list) else value


def _kind_of(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.major}.{properties.minor}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {_processor()}"


def _processor() -> str:
    """Digest of what this processor can do, for which CPU kernels are built."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    told = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return hashlib.sha256("\n".join(sorted(told) or [text]).encode()).hexdigest()[:16]


def writable_compiler_folder() -> None:
    """See to it that the compiler has a folder to write to: it takes none but the one of its variable, or one under the
    system's temporary folder that is named after the user, which a user id need not have."""
    given = os.environ.get(COMPILER_VARIABLE)
    if given and is_writable(Path(given)):
        return
    if not given:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        try:
            if is_writable(Path(default_cache_dir())):
                return
        except (KeyError, OSError, ImportError):  # no name for the user, in versions of PyTorch that need one
            pass
    folder = cache_folder("inductor")
    wanted = f"its folder {given} cannot be written" if given else "it finds no folder it can write"
    say_once(f"the compiler uses {folder}: {wanted} (set {COMPILER_VARIABLE} to choose another)")
    os.environ[COMPILER_VARIABLE] = str(folder)


@dataclass
class Artifacts:
    """The compiled code of one pipeline on one kind of machine."""

    identity: dict[str, Any]
    folder: Path
    known: set[str] = field(default_factory=set)
    """Entries that stand in files."""
    _calls: list[Told] = field(default_factory=list)
    _libraries: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[tuple[Path, bytes, dict[str, bytes]]] = field(default_factory=list)
    """What was read and not handed to the compiler."""

    @classmethod
    def of(cls, config: PipelineConfig, device: torch.device) -> Artifacts:
        """Those that belong to ``config`` on ``device``."""
        return cls(identity(config, device), cache_folder("compiled"))

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    def load(self) -> int:
        """Read what was kept; returns how many entries. A file that is damaged, or was made elsewhere, is left out and
        said once. The compiler gets its part when it is needed (:meth:`hand_over`)."""
        count = 0
        for file in sorted(self.folder.glob(f"{self.stem}-*{SUFFIX}")):
            try:
                header, calls, artifacts, libraries = _read(file)
                if header["identity"] != self.identity:
                    raise ValueError("it was made on another machine or by other versions")
                native.check_names(libraries)
                entries = set(header["entries"])
                os.utime(file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _leave_out(file, error)
                continue
            self.known |= entries
            self._libraries.update(libraries)
            self._calls += [call for call in calls if call not in self._calls]
            self._waiting.append((file, artifacts, libraries))
            count += len(entries - set(libraries))
        return count

    @property
    def has_calls(self) -> bool:
        """Whether calls were kept that can be made without the compiler."""
        return bool(self._calls)

    def calls_of(self, function: Any) -> KeptCalls:
        """The kept calls of modules with this ``forward``."""
        return KeptCalls(function, of_kind(self._calls, function), self._libraries, self.folder)

    def hand_over(self) -> None:
        """Give the compiler what was read."""
        waiting, self._waiting = self._waiting, []
        for file, artifacts, libraries in waiting:
            try:
                native.restore(libraries)
                if torch.compiler.load_cache_artifacts(artifacts) is None:
                    raise ValueError("PyTorch cannot read it")
            except (OSError, ValueError) as error:
                _leave_out(file, error)

    def save(self, calls: Iterable[Told] = ()) -> Path | None:
        """Keep what this process compiled or used, and ``calls`` of it, if there is anything new in it; returns the
        file written."""
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return None
        artifacts, info = made
        earlier = [call for call in self._calls if is_current(call)]
        kept = {name_of_call(call): call for call in (*earlier, *calls)}
        try:
            libraries = {**{name: self._libraries[name] for name in _kernels(earlier)}, **native.collect()}
        except OSError as error:
            say_once(f"the compiled kernels cannot be read, so they are not kept: {error.strerror or error}")
            return None
        entries = _entries(info.artifacts, libraries, kept)
        written = json.dumps(list(kept.values())).encode()
        size = len(written) + len(artifacts) + sum(map(len, libraries.values()))
        if entries <= self.known:
            return None
        if size > MAX_FILE:
            say_once(f"compiled code of {size / 2**20:.0f} MiB is not kept; at most {MAX_FILE >> 20} MiB are")
            return None
        name = hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()[:16]
        file = self.folder / f"{self.stem}-{name}{SUFFIX}"
        content = b"".join((written, artifacts, *libraries.values()))
        header = {
            "identity": self.identity,
            "entries": sorted(entries),
            "calls": len(written),
            "libraries": {name: len(library) for name, library in libraries.items()},
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        try:
            _write(file, json.dumps(header).encode() + b"\n" + content)
            outdated = [call for call in self._calls if call not in earlier]
            self._drop_covered(file, entries | _entries({}, _kernels(outdated), map(name_of_call, outdated)))
            prune(self.folder, MAX_FOLDER)
        except OSError as error:
            say_once(f"compiled code cannot be kept in {self.folder}: {error.strerror or error}")
            return None
        self.known |= entries
        return file

    def _drop_covered(self, newest: Path, entries: set[str]) -> None:
        """Remove files of which everything stands in the newest one too."""
        for file in self.folder.glob(f"{self.stem}-*{SUFFIX}"):
            if file != newest and entries.issuperset(_header(file).get("entries", ())):
                file.unlink(missing_ok=True)


def prune(folder: Path, limit: int) -> None:
    """Remove the files not used for the longest time until those left have at most ``limit`` bytes."""
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > limit:
            file.unlink(missing_ok=True)


def _entries(artifacts: Mapping[str, Iterable[str]], libraries: Iterable[str], calls: Iterable[str]) -> set[str]:
    return {f"{kind}:{key}" for kind, keys in {**artifacts, "call": calls}.items() for key in keys} | set(libraries)


def _kernels(calls: Iterable[Told]) -> set[str]:
    return {library for call in calls for library in call["generated"]["kernels"].values()}


def _leave_out(file: Path, why: Exception) -> None:
    say_once(f"compiled code in {file} is not used: {why}; it can be deleted")


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.readline())
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def _read(file: Path) -> tuple[dict[str, Any], list[Told], bytes, dict[str, bytes]]:
    """Header, calls, artifacts and libraries of a file."""
    head, _, content = file.read_bytes().partition(b"\n")
    try:
        header = json.loads(head)
        whole = hashlib.sha256(content).hexdigest() == header["sha256"]
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError("it is damaged")
    libraries, end = {}, len(content)
    for name, size in reversed(header["libraries"].items()):
        libraries[name], end = content[end - size : end], end - size
    begin = header["calls"]
    return header, json.loads(content[:begin]), content[begin:end], libraries


def _write(file: Path, content: bytes) -> None:
    """In one step, so that no reader meets half of it."""
    handle, partial = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
