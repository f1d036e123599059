"""Contact sheets and single frames as PNG."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flashdreams.core.media import MediaError
from flashdreams.core.media.sheet import contact_sheet, pick_frames, write_png

pytestmark = pytest.mark.ci_cpu


def numbered(count: int, height: int = 6, width: int = 10) -> np.ndarray:
    """Frames whose grey level is their number."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, height, width, 3))


@pytest.mark.parametrize("count", [0, 1, 2, 23, 24, 25, 65, 4000])
def test_picked_frames_rise_evenly_from_the_first_to_the_last(count):
    picked = pick_frames(count, 24)
    assert len(picked) == min(count, 24)
    if count:
        assert picked[0] == 0 and picked[-1] == count - 1
    steps = np.diff(picked)
    assert count < 2 or (steps.min() >= 1 and steps.max() - steps.min() <= 1)


def test_a_sheet_shows_the_picked_frames_row_by_row_with_gaps(tmp_path):
    path = tmp_path / "made" / "sheet.png"
    contact_sheet(numbered(65), path, columns=8, max_frames=24)
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (3 * (6 + 2) + 2, 8 * (10 + 2) + 2, 3)
    centres = sheet[5::8, 7::12][:3, :8, 0]
    assert centres.ravel().tolist() == pick_frames(65, 24)
    gap = sheet[0, 0].tolist()
    assert all(sheet[row].tolist() == [gap] * sheet.shape[1] for row in (0, 1, 8, 9, -1))


def test_few_frames_make_a_narrow_sheet(tmp_path):
    contact_sheet(numbered(3), tmp_path / "sheet.png")
    assert np.asarray(Image.open(tmp_path / "sheet.png")).shape == (6 + 4, 3 * 12 + 2, 3)


def test_large_frames_are_scaled_down(tmp_path):
    contact_sheet(np.zeros((2, 720, 1280, 3), dtype=np.uint8), tmp_path / "sheet.png")
    assert np.asarray(Image.open(tmp_path / "sheet.png")).shape == (144 + 4, 2 * 258 + 2, 3)


def test_a_frame_is_written_exactly(tmp_path, moving_picture):
    frame = moving_picture(1)[0]
    write_png(frame, tmp_path / "frame.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "frame.png")), frame)


def test_a_sheet_that_cannot_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(MediaError, match=r"frame.jpg.*does not end in .png"):
        write_png(np.zeros((4, 4, 3), dtype=np.uint8), tmp_path / "frame.jpg")
    (tmp_path / "file").touch()
    with pytest.raises(MediaError, match=r"cannot be written: Not a directory"):
        write_png(np.zeros((4, 4, 3), dtype=np.uint8), tmp_path / "file" / "frame.png")


@pytest.mark.parametrize(
    "frames", [np.zeros((0, 4, 4, 3), np.uint8), np.zeros((2, 4, 4, 3)), np.zeros((4, 4, 3), np.uint8)]
)
def test_frames_of_another_kind_are_refused(tmp_path, frames):
    with pytest.raises(ValueError, match="expected uint8"):
        contact_sheet(frames, tmp_path / "sheet.png")
    assert not list(tmp_path.iterdir())
