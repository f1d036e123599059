"""Why a plugin may not fit this version of flashdreams; looked at when importing it has failed. No torch here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from flashdreams._version import __version__
from flashdreams.plugins import API_VERSION


def declared_api(module_name: str) -> int | None:
    """``FLASHDREAMS_API`` as the source of a module states it; ``None`` if it does not or cannot be read."""
    try:
        spec = importlib.util.find_spec(module_name)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    except Exception:  # the plugin is broken already; this only looks for a better reason
        return None
    match = re.search(r"^FLASHDREAMS_API(?:\s*:\s*\w+)?\s*=\s*(\d+)", source, re.MULTILINE)
    return int(match[1]) if match else None


def required_version(distribution: importlib.metadata.Distribution | None) -> str:
    """``"made for flashdreams>=2, ... "`` if the distribution asks for another version of flashdreams, else ``""``."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in (distribution.requires or []) if distribution else []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name.lower() == "flashdreams" and not requirement.specifier.contains(
            __version__, prereleases=True
        ):
            asked = f"flashdreams{requirement.specifier}"
            return f"made for {asked}, this is flashdreams {__version__} (API {API_VERSION}): "
    return ""
