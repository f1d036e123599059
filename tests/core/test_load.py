"""Strict loading: everything matches, or the message says what does not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, read_header, resolve_path

pytestmark = pytest.mark.ci_cpu


def meta_module() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def weights():
    return {key: torch.randn(value.shape) for key, value in meta_module().state_dict().items()}


@pytest.fixture
def save(tmp_path):
    def save(state):
        save_file(state, tmp_path / "w.safetensors")
        return str(tmp_path / "w.safetensors")

    return save


def test_a_meta_module_gets_every_tensor_in_the_asked_dtype(weights, save):
    module = meta_module()
    report = load_checkpoint(module, save(weights), dtype=torch.bfloat16)
    assert report.tensors == 4 and report.digest.startswith("sha256:") and not report.missing
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights[key].bfloat16())


def test_transform_and_read_header(weights, save):
    path = save({"net." + key: value for key, value in weights.items()})
    module = meta_module()
    load_checkpoint(module, path, transform=lambda s: {k.removeprefix("net."): v for k, v in s.items()})
    assert torch.equal(module[1].bias, weights["1.bias"])
    assert read_header(resolve_path(path))["net.0.weight"] == [4, 3]


def test_missing_unexpected_and_misshapen_are_named_with_the_nearest(weights, save):
    weights["1.wieght"] = weights.pop("1.weight")
    weights["0.bias"] = torch.zeros(7)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(meta_module(), save(weights))
    text = str(error.value)
    assert "missing 1.weight [2, 4]; nearest: 1.wieght" in text
    assert "unexpected 1.wieght [2, 4]" in text
    assert "0.bias is [7], expected [4]" in text


def test_only_exactly_named_keys_may_be_absent(weights, save):
    del weights["1.bias"]
    path, module = save(weights), meta_module()
    with pytest.raises(CheckpointError, match=r"missing 1\.bias"):
        load_checkpoint(module, path, allow_missing=["1.*"])
    report = load_checkpoint(module, path, allow_missing=["1.bias"])
    assert report.missing == ("1.bias",) and not module[1].bias.any()


def test_unreadable_files_are_said_to_be_so(tmp_path, weights, save):
    whole = resolve_path(save(weights)).read_bytes()
    for name, data, message in [
        ("cut.safetensors", whole[:-9], "not a whole safetensors file"),
        ("empty.safetensors", b"", r"\(0 bytes\) is not a whole"),
        ("text.safetensors", b"hello, this is text", "not a whole safetensors file"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(meta_module(), str(tmp_path / name))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(meta_module(), str(tmp_path / "absent.safetensors"))


def test_package_paths():
    assert resolve_path("package://flashdreams/_version.py").is_file()
