"""flashdreams: video diffusion models as a stream, chunk by chunk, under live control."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashdreams._version import __version__

if TYPE_CHECKING:
    from flashdreams.infra.load import load_pipeline

__all__ = ["__version__", "load_pipeline"]


def __getattr__(name: str) -> Any:
    """Import on demand what needs torch, so that ``import flashdreams`` does not."""
    if name == "load_pipeline":
        from flashdreams.infra.load import load_pipeline

        return load_pipeline
    raise AttributeError(f"module 'flashdreams' has no attribute {name!r}")
