"""Live controls: typed values per frame, what a model takes of them, timelines, recordings. Loads no torch."""

from flashdreams.core.controls.live import LiveControls
from flashdreams.core.controls.messages import control_from_json, control_to_json
from flashdreams.core.controls.poses import interpolate
from flashdreams.core.controls.recording import ControlWriter, Recording, load_controls, save_controls
from flashdreams.core.controls.resample import by_latent
from flashdreams.core.controls.script import parse_script, read_controls
from flashdreams.core.controls.spec import ControlSpec
from flashdreams.core.controls.timeline import ControlTimeline
from flashdreams.core.controls.types import (
    Control,
    ControlError,
    Frame,
    Intrinsics,
    Keys,
    Mouse,
    Picture,
    Pose,
)

__all__ = [
    "Control",
    "ControlError",
    "ControlSpec",
    "ControlTimeline",
    "ControlWriter",
    "Frame",
    "Intrinsics",
    "Keys",
    "LiveControls",
    "Mouse",
    "Picture",
    "Pose",
    "Recording",
    "by_latent",
    "control_from_json",
    "control_to_json",
    "interpolate",
    "load_controls",
    "parse_script",
    "read_controls",
    "save_controls",
]
