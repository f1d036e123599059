"""Where the camera goes: trajectories, keys, files of poses, and the stream of their conditioning."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import Control, ControlError, Intrinsics, Keys, Pose
from flashdreams.infra.layout import ChunkPlan, Layout
from lingbot._drive import move
from lingbot._encoder import in_picture
from lingbot._keys import KEYS, TRAJECTORIES
from lingbot._paths import CameraPath, controls_of, read_path
from lingbot.config import RUNNER_LINGBOT_WORLD_CAM, CameraEncoderConfig

pytestmark = pytest.mark.ci_cpu

LAYOUT = Layout(1, 16, 4, 6, ChunkPlan(3, 3))
STILL = torch.eye(4, dtype=torch.float64)


def walk(count: int, step: float = 0.5) -> np.ndarray:
    """A camera that goes forward, evenly."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, 2, 3] = step * np.arange(count)
    return poses


def encode(controls: list[Control | None], config: CameraEncoderConfig, *spans: tuple[int, int]) -> Tensor:
    """Conditioning of one sample, span by span of latent frames."""
    encoder = config.setup()
    cache = encoder.initialize_cache(LAYOUT)
    parts = [encoder.encode([controls[max(0, 4 * a - 3) : 4 * b - 3]], a, b, cache) for a, b in spans]
    return torch.cat(parts, dim=2)


def origins(conditioning: Tensor) -> Tensor:
    """Where the rays of each latent frame begin, ``[T, 3]``."""
    return conditioning[0, [0, 64, 128], :, 0, 0].T


def test_a_stream_in_chunks_is_the_whole_at_once() -> None:
    keys = [Control(keys=Keys("w", "left"))] * 9 + [None] * 4 + [Control(keys=Keys("d", "up"))] * 20
    for config in (CameraEncoderConfig(), CameraEncoderConfig(takes_keys=True)):
        whole = encode(keys, config, (0, 9))
        assert whole.shape == (1, 448 if config.takes_keys else 384, 9, 4, 6)
        assert torch.equal(encode(keys, config, (0, 3), (3, 6), (6, 9)), whole)
        assert torch.equal(encode(keys, config, *((k, k + 1) for k in range(9))), whole)


def test_streams_of_a_batch_and_of_a_pipeline_do_not_mix() -> None:
    encoder = CameraEncoderConfig().setup()
    layout = Layout(2, 16, 4, 6, ChunkPlan(3, 3))
    forward, right = [Control(keys=Keys("w"))] * 9, [Control(keys=Keys("d"))] * 9
    one, other = encoder.initialize_cache(layout), encoder.initialize_cache(layout)
    both = encoder.encode([forward, right], 0, 3, one)
    swapped = encoder.encode([right, forward], 0, 3, other)
    assert torch.equal(both, swapped.flip(0))
    assert not torch.equal(both[0], both[1])
    later = encoder.encode([right[:4], right[:4]], 3, 4, one)
    assert torch.equal(later[0], later[1]), "relative to where each is, both go right"


def test_the_pose_of_latent_frame_k_is_that_of_pixel_frame_4k() -> None:
    poses = [Pose(matrix.tolist()) for matrix in walk(9)]
    moved = encode([Control(pose=pose) for pose in poses], CameraEncoderConfig(world_scale=2.0), (0, 3))
    torch.testing.assert_close(origins(moved), torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 0, 1]]))
    poses[1:4] = [Pose(walk(100)[99].tolist())] * 3  # seen by no latent frame
    again = encode([Control(pose=pose) for pose in poses], CameraEncoderConfig(world_scale=2.0), (0, 3))
    assert torch.equal(again, moved)


def test_without_controls_the_camera_stands_still() -> None:
    still = encode([None] * 9, CameraEncoderConfig(), (0, 3))
    assert not origins(still).any()
    assert torch.equal(still[:, :, 0], still[:, :, 1]) and still.std() > 0.1
    with_keys = encode([Control(keys=Keys("w"))] + [None] * 8, CameraEncoderConfig(), (0, 3))
    assert torch.equal(with_keys, still), "the first frame is the given picture: nothing moves before it"


def test_controls_for_another_number_of_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="8 controls were given for video frames 0 to 8"):
        encode([None] * 8, CameraEncoderConfig(), (0, 3))


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_a_trajectory_takes_the_camera_where_its_name_says(name: str) -> None:
    config = CameraEncoderConfig()
    controls = config.parse_controls(name, 81)
    assert len(controls) == 81 and all(control.keys.held == TRAJECTORIES[name] for control in controls)
    pose = STILL
    for _ in range(80):
        pose = move(pose, controls[0].keys, STILL, config.move / 4, math.radians(config.turn / 4))
    (x, y, z), ahead = pose[:3, 3].tolist(), pose[:3, 2]
    goes = {"forward": z > 0, "back": z < 0, "strafe-left": x < 0, "strafe-right": x > 0}
    looks = {"pan-left": ahead[0] < 0, "pan-right": ahead[0] > 0, "tilt-up": ahead[1] < 0, "tilt-down": ahead[1] > 0}
    if name in goes:
        assert goes[name] and torch.equal(pose[:3, :3], STILL[:3, :3]) and math.hypot(x, y, z) == pytest.approx(20)
    elif name in looks:
        assert looks[name] and (x, y, z) == (0, 0, 0)
    else:  # around a point straight ahead, which stays at its distance and in the middle of the picture
        radius = 1 / math.radians(config.turn)
        centre = torch.tensor([0, 0, radius], dtype=torch.float64) - pose[:3, 3]
        assert centre.norm().item() == pytest.approx(radius, rel=0.01)
        assert (centre / centre.norm() @ ahead).item() > 0.999
        assert (x < -1) == (name == "orbit-left") and (x > 1) == (name == "orbit-right")


def test_a_trajectory_moves_by_whole_steps_as_a_file_of_the_same_path_would() -> None:
    """The longest step of a file's path is 1, whatever its units."""
    config = CameraEncoderConfig()
    by_keys = encode(config.parse_controls("forward", 9), config, (0, 3))
    by_file = encode(controls_of(CameraPath(torch.from_numpy(walk(9, step=37.0))), 9, 4), config, (0, 3))
    torch.testing.assert_close(by_file, by_keys, rtol=0, atol=1e-6)


def test_a_file_is_brought_to_the_scale_of_live_poses(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path / "path", poses=walk(9, step=37.0)))
    seen = [
        encode(config.parse_controls(folder, 9), config, (0, 3))
        for config in (CameraEncoderConfig(), CameraEncoderConfig(world_scale=5.0))
    ]
    torch.testing.assert_close(*seen, rtol=0, atol=1e-6)


def test_two_keys_at_once_are_no_faster_and_the_camera_does_not_roll_or_turn_over() -> None:
    ahead = move(STILL, Keys("w", "d"), STILL, 1.0, 0.1)
    assert ahead[:3, 3].norm().item() == pytest.approx(1)
    pose = STILL
    for _ in range(300):
        pose = move(pose, Keys("up", "left"), STILL, 1.0, math.radians(3))
    assert pose[1, 0].abs() < 1e-9, "the camera's own horizontal stays level"
    assert -pose[1, 2] == pytest.approx(math.sin(math.radians(80)), abs=0.06)
    torch.testing.assert_close(pose[:3, :3] @ pose[:3, :3].T, STILL[:3, :3])


def test_keys_say_what_they_do_and_others_are_refused() -> None:
    config = CameraEncoderConfig()
    assert set(KEYS) == {"w", "a", "s", "d", "left", "right", "up", "down"}
    controls = config.parse_controls("w:2 w+left:3 none:1", 81)
    assert [control and control.keys for control in controls] == [Keys("w")] * 2 + [Keys("w", "left")] * 3 + [None]
    for words in ("jump", "", "w:2 " * 300 + "jump"):
        with pytest.raises(ControlError, match="is not known"):
            config.parse_controls(words, 81)


def test_the_action_model_is_told_the_keys_of_every_fourth_frame_and_directions_alone() -> None:
    config = CameraEncoderConfig(takes_keys=True)
    held = [Keys(), *[Keys("w")] * 3, Keys("a"), *[Keys()] * 3, Keys("s", "d")]
    poses = walk(9)
    controls = [Control(pose=Pose(matrix.tolist()), keys=keys) for matrix, keys in zip(poses, held)]
    told = encode(controls, config, (0, 3))
    keys = told[0, 192:].unflatten(0, (4, 64))
    assert torch.equal(keys, keys[:, :1, :, :1, :1].expand_as(keys))
    assert keys[:, 0, :, 0, 0].T.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    directions = encode(controls, CameraEncoderConfig(), (0, 3))[:, 192:]
    assert torch.equal(told[:, :192], directions), "translations never reach it"


def save_folder(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir()
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", value)
    return folder


def test_a_path_is_read_from_a_folder_an_npz_or_json(tmp_path: Path) -> None:
    arrays = {
        "poses": walk(9), "intrinsics": np.array([[500.0, 480, 416, 240]] * 9),
        "action": np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3, 0]],
    }  # fmt: skip
    folder = save_folder(tmp_path / "path", **arrays)
    np.savez(tmp_path / "path.npz", **arrays)
    (tmp_path / "path.json").write_text(json.dumps({name: value.tolist() for name, value in arrays.items()}))
    read = [
        read_path(source) for source in (folder, folder / "poses.npy", tmp_path / "path.npz", tmp_path / "path.json")
    ]
    for each in read:
        assert torch.equal(each.poses, torch.from_numpy(arrays["poses"]))
        assert each.intrinsics == Intrinsics(500, 480, 416, 240, 832, 480)
        assert [keys.held for keys in each.keys[:5]] == [("w",), ("a",), ("s",), ("d",), ("w",)]
    controls = CameraEncoderConfig().parse_controls(str(folder), 9)
    assert [control.keys for control in controls] == list(read[0].keys)
    assert controls[8].pose.translation == (0, 0, 2), "two steps between three latent frames"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"intrinsics": np.ones((1, 4))}, "has no poses"),
        ({"poses": walk(9)[:, :3]}, r"have shape \[9, 3, 4\]; expected \[N, 4, 4\]"),
        ({"poses": np.zeros((0, 4, 4))}, "have shape"),
        ({"poses": 2 * walk(9)}, "frame 0 of .*last row of the pose"),
        ({"poses": walk(9) * np.array([1, -1, 1, 1])[:, None]}, "frame 0 of .*mirror image"),
        ({"poses": np.where(np.arange(9)[:, None, None] == 4, np.nan, walk(9))}, "not finite, first in row 4"),
        ({"poses": walk(9), "intrinsics": np.ones((9, 3))}, "expected rows of fx, fy, cx, cy"),
        ({"poses": walk(9), "action": np.ones((8, 4))}, r"expected \[9, 4\] of 0 and 1"),
        ({"poses": walk(9), "action": np.full((9, 4), 0.5)}, "of 0 and 1"),
    ],
)
def test_a_path_that_is_none_is_refused_with_its_place(arrays: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=message):
        CameraEncoderConfig().parse_controls(str(save_folder(tmp_path / "path", **arrays)), 81)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "empty.npz").touch()
    for name in ("list.json", "broken.npz", "empty.npz", "missing.npz", "missing_folder/poses"):
        with pytest.raises(ControlError, match=name):
            CameraEncoderConfig().parse_controls(str(tmp_path / name), 81)


def test_a_path_that_differs_by_less_than_a_chunk_is_spread_over_the_run() -> None:
    """As published for a run that is cut to whole chunks: 25 poses, 6 latent frames, so points 0, 4.8, 9.6, ..."""
    path = CameraPath(torch.from_numpy(walk(25) * 1.0))
    controls = controls_of(path, 21, chunk_frames=12)
    places = [control.pose.translation[2] for control in controls[::4]]
    assert places == pytest.approx([0, 1, 2, 3, 4, 5])
    curved = walk(25)
    curved[:, 2, 3] = np.arange(25) ** 2
    controls = controls_of(CameraPath(torch.from_numpy(curved)), 21, chunk_frames=12)
    at = [4.8 * k for k in range(6)]
    want = [math.floor(u) ** 2 + (u - math.floor(u)) * (2 * math.floor(u) + 1) for u in at]
    scale = want[-1] - want[-2]
    assert [control.pose.translation[2] for control in controls[::4]] == pytest.approx([z / scale for z in want])


def test_a_longer_path_is_followed_as_far_as_the_run_goes_and_at_the_end_of_a_shorter_one_the_camera_stops(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = controls_of(CameraPath(torch.from_numpy(walk(101))), 21, chunk_frames=12)
    assert [control.pose.translation[2] for control in long[::4]] == pytest.approx([0, 1, 2, 3, 4, 5])
    short = controls_of(CameraPath(torch.from_numpy(walk(9))), 41, chunk_frames=12)
    assert [control.pose.translation[2] for control in short[::4]] == pytest.approx([0, 1, *[2] * 9])
    assert "has 9 of 41 frames" in capsys.readouterr().err


def test_a_path_of_one_pose_or_of_one_frame_is_no_division_by_nothing() -> None:
    for count, frames in ((1, 1), (1, 9), (9, 1), (3, 1)):
        controls = controls_of(CameraPath(torch.from_numpy(walk(count))), frames, chunk_frames=4)
        assert len(controls) == frames and controls[0].pose.translation == (0, 0, 0)


def test_intrinsics_may_be_of_a_picture_of_any_size() -> None:
    assert in_picture(Intrinsics(250, 240, 208, 120, 416, 240)) == (500, 480, 416, 240)


def test_a_later_pose_without_intrinsics_keeps_those_before() -> None:
    wide = Intrinsics(300, 300, 416, 240, 832, 480)
    poses = [Pose(matrix.tolist()) for matrix in walk(5)]
    rest = [Control(pose=pose) for pose in poses[1:]]
    seen = encode([Control(pose=Pose(poses[0].matrix, wide)), *rest], CameraEncoderConfig(), (0, 2))
    usual = encode([Control(pose=poses[0]), *rest], CameraEncoderConfig(), (0, 2))
    assert not torch.equal(seen, usual)
    assert torch.equal(seen, encode([Control(pose=pose) for pose in poses],
                                    CameraEncoderConfig(intrinsics=in_picture(wide)), (0, 2)))  # fmt: skip


def test_the_flag_and_control_are_two_words_for_one_thing() -> None:
    runner = derive_config(RUNNER_LINGBOT_WORLD_CAM, trajectory="orbit-left")
    assert runner.control_source() == "orbit-left"
    assert derive_config(RUNNER_LINGBOT_WORLD_CAM, control="w:8").control_source() == "w:8"
    assert RUNNER_LINGBOT_WORLD_CAM.control_source() is None
    with pytest.raises(ConfigError, match="both say where the camera goes"):
        derive_config(runner, control="w:8").validate()


@pytest.mark.parametrize("fields", [{"world_scale": 0.0}, {"intrinsics": (0.0, 1.0, 1.0, 1.0)}, {"chunk_frames": 0}])
def test_values_that_mean_nothing_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        CameraEncoderConfig(**fields).setup()
