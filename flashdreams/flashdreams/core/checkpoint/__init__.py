"""Reading weights."""

from flashdreams.core.checkpoint.load import CheckpointError, LoadReport, load_checkpoint, read_header, resolve_path

__all__ = ["CheckpointError", "LoadReport", "load_checkpoint", "read_header", "resolve_path"]
