"""Files written tensor by tensor are those that safetensors writes; a failure leaves none."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdreams.core.checkpoint import CheckpointError, open_checkpoint
from flashdreams.core.checkpoint.mapped import DTYPE_NAMES
from flashdreams.core.checkpoint.write import Entry, parse_size, write_checkpoint

pytestmark = pytest.mark.ci_cpu


def entries(state: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(key, tuple(value.shape), value.dtype, lambda value=value: value) for key, value in state.items()]


def mixed() -> dict[str, torch.Tensor]:
    """A tensor or two of every number format, in no order; one is empty, one a number, one not contiguous."""
    state = {}
    for i, dtype in enumerate(DTYPE_NAMES):
        state[f"{9 - i % 7}.{i}"] = torch.arange(6).remainder(2).to(torch.float32).to(dtype).view(2, 3)
        state[f"ü {i}"] = torch.zeros(3, dtype=torch.uint8).to(dtype)
    state |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "turned": torch.randn(3, 5).T}
    return state


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(tmp_path, metadata):
    state = mixed()
    write_checkpoint(tmp_path / "ours.safetensors", entries(state), metadata)
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "theirs.safetensors", metadata)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_shards_have_an_index_and_are_read_as_one(tmp_path):
    state = {f"t{i}": torch.randn(100) for i in range(10)}
    files = write_checkpoint(tmp_path / "m.safetensors", entries(state), None, shard_size=1000)
    assert [file.name for file in files] == [
        *(f"m-{number:05d}-of-00005.safetensors" for number in range(1, 6)), "m.safetensors.index.json",
    ]  # fmt: skip
    assert open_checkpoint(tmp_path / "m.safetensors").tensors.keys() == state.keys()
    read = {key: value for file in files[:-1] for key, value in load_file(file).items()}
    assert all(torch.equal(read[key], value) for key, value in state.items())


def test_a_failure_leaves_no_file_and_the_old_one(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text("old")

    def fail() -> torch.Tensor:
        raise CheckpointError("the source is broken")

    broken = [*entries({"a": torch.zeros(2)}), Entry("b", (2,), torch.float32, fail)]
    with pytest.raises(CheckpointError, match="the source is broken"):
        write_checkpoint(path, broken)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7))
    with pytest.raises(CheckpointError, match=r"takes 0.0 GB, but .* give another folder"):
        write_checkpoint(tmp_path / "m.safetensors", entries({"a": torch.zeros(2)}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("300", 300)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5GiBs", "nan", "0.1B"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_size(text)
