"""The machine code of compiled CPU kernels, which PyTorch's own artifacts leave out: with the source alone, a second
start would call the C++ compiler for each of them again.

The compiler looks for a library under a name made of a digest of its source and of the command that builds it, so that
putting the file back is all it takes; where the command differs, the file is not looked at.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")


def compiler_folder() -> Path:
    """Where the compiler keeps its files in this process."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def collect() -> dict[str, bytes]:
    """The libraries that this process has loaded, and those that the compiler probes the processor with, by name."""
    folder, keys = compiler_folder(), set(_loaded_keys())
    files = {}
    for path in folder.glob("*/*.so"):
        name = path.relative_to(folder).as_posix()
        key, _, kind = path.name.partition(".")
        if _NAME.fullmatch(name) and (key in keys or kind == "so"):
            files[name] = path.read_bytes()
    return dict(sorted(files.items()))


def check_names(names: Iterable[str]) -> None:
    """See to it that files have names of libraries.

    Raises:
        ValueError: a name is not one that the compiler gives.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"it holds a file {name!r}")


def restore(files: Mapping[str, bytes]) -> None:
    """Put libraries back where the compiler looks for them; those that are there already stay.

    Raises:
        ValueError: as :func:`check_names`.
    """
    check_names(files)
    folder = compiler_folder()
    for name, content in files.items():
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(partial, 0o755)
        os.replace(partial, path)


def probe_processor() -> None:
    """Let the compiler find out which vector instructions there are while it traces: it builds a library for them and
    loads it in a process of its own, which takes seconds, or half of one where the library was put back before. What
    fails here, or is elsewhere in this version of PyTorch, the compiler meets and says itself."""
    try:  # all that the thread imports: two threads that import modules which import each other may get half of one
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401
        from torch.utils import _filelock  # noqa: F401
    except ImportError:
        return

    def probe() -> None:
        with suppress(Exception):
            cpu_vec_isa.valid_vec_isa_list()

    threading.Thread(target=probe, name="probe-processor", daemon=True).start()


def _loaded_keys() -> Iterator[str]:
    """Digests of the libraries in use; none where this version of PyTorch keeps them elsewhere."""
    from torch._inductor import codecache

    kinds: list[Any] = [getattr(codecache, "CppCodeCache", None)]
    while kinds:
        kind = kinds.pop()
        if kind is not None:
            yield from getattr(kind, "cache", ())
            kinds += kind.__subclasses__()
