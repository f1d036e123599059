"""Reading weights: any source, checked before it is believed, streamed into a module."""

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.load import load_checkpoint, match_checkpoint, read_header
from flashdreams.core.checkpoint.opened import Checkpoint, open_checkpoint
from flashdreams.core.checkpoint.report import LoadReport, Match, compare
from flashdreams.core.checkpoint.sources import parse_source, resolve_path

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LoadReport",
    "Match",
    "compare",
    "load_checkpoint",
    "match_checkpoint",
    "open_checkpoint",
    "parse_source",
    "read_header",
    "resolve_path",
]
