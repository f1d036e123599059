"""``flashdreams doctor``: what of this machine a run depends on, and one line of advice for each problem."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.plugins import API_VERSION
from flashdreams.plugins.compatibility import declared_api
from flashdreams.plugins.guard import without_torch
from flashdreams.plugins.registry import PluginError, PluginWarning, discover_postprocessors, discover_runners
from flashdreams.scripts.console import columns
from flashdreams.scripts.doctor_machine import attention, block_sparse, caches, devices, versions

USAGE = "usage: flashdreams doctor\n\nChecks this machine. Exit code 1, and advice on each problem, if there is one."


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at, what was found, and what to do about it (nothing, if all is well)."""

    name: str
    text: str
    advice: str = ""


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams doctor``."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if words:
        raise UserError(f"{words[0]!r} means nothing to {program}, which takes no flags")
    problems = 0
    for title, check in SECTIONS.items():
        findings = _findings(title, check)
        print(f"{title}\n{columns((_name(each), each.text) for each in findings)}", flush=True)
        for each in findings:
            if each.advice:
                print(f"  -> {each.name}: {each.advice}", flush=True)
        problems += sum(bool(each.advice) for each in findings)
    print(f"\n{problems} problem{'s' * (problems != 1)} found" if problems else "\nno problem found")
    return int(problems > 0)


def _findings(title: str, check: Callable[[], Iterator[tuple[str, ...]]]) -> list[Finding]:
    """A check that breaks is a finding too, and does not hide the others."""
    found: list[Finding] = []
    try:
        found += (Finding(*each) for each in check())
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found.append(Finding(title, f"the check failed: {what}", "report this with the lines above"))
    return found


def _name(finding: Finding) -> str:
    return f"! {finding.name}" if finding.advice else finding.name


def plugins() -> Iterator[tuple[str, ...]]:
    """Every runner and post-processor, where it comes from, and the API it was made for. Before torch is imported."""
    for entry in (*discover_runners().values(), *discover_postprocessors().values()):
        module = entry.reference.partition(":")[0]
        with without_torch() as guard, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", PluginWarning)
            try:
                entry.load()
                problem = ""
            except PluginError as error:
                problem = "" if guard.asked else str(error)
        api = declared_api(module)
        text = f"{entry.source}, {entry.reference}, API {API_VERSION if api is None else api}"
        text += "" if api is not None else " (not stated)"
        if problem:
            yield entry.slug, text, f"{problem}; update or uninstall it"
        elif twice := next((str(each.message) for each in said if "is there twice" in str(each.message)), ""):
            yield entry.slug, text, f"{twice}; uninstall one of them"
        elif guard.asked:
            yield entry.slug, f"{text}; imports torch where listings look", "ask its author to name classes lazily"
        else:
            yield entry.slug, text


def encoder() -> Iterator[tuple[str, ...]]:
    """An mp4 written with the writer that runs use, and read again."""
    try:
        import av
        import numpy as np

        from flashdreams.core.media.video import VideoWriter
    except ImportError as error:
        yield "PyAV", f"cannot be imported: {error}", "pip install --force-reinstall av"
        return
    yield "PyAV", f"{av.__version__}, FFmpeg libraries {_dotted(av.library_versions['libavcodec'])} (libavcodec)"
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.mp4"
            with VideoWriter(path, Fraction(16), 32, 48) as writer:
                writer.write(np.zeros((5, 32, 48, 3), np.uint8))
            with av.open(str(path)) as video:
                count = sum(1 for _ in video.decode(video=0))
        if count != 5:
            raise RuntimeError(f"{count} of 5 frames came back")
    except Exception as error:
        what = " ".join(str(error).split())[:160]
        yield "H.264", f"a test video failed: {what}", "pip install --force-reinstall av (its wheels bring libx264)"
    else:
        yield "H.264", "a test video was written and read again"
    program = shutil.which("ffmpeg")
    yield "ffmpeg program", program or "not there (nothing needs it: PyAV brings the libraries)"


def _dotted(version: Any) -> str:
    return ".".join(map(str, version))


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "Plugins": plugins,
    "Versions": versions,
    "Devices": devices,
    "Attention": attention,
    "Block-sparse attention": block_sparse,
    "Caches": caches,
    "Video": encoder,
}
"""In this order: plugins are looked at while torch is not imported yet."""
