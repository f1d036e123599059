"""Before a model is loaded whose number formats this processor computes in slowly, one line says so."""

from __future__ import annotations

from types import SimpleNamespace

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.infra import number_formats
from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.load import load_pipeline
from flashdreams.infra.number_formats import slow_formats
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.scripts.run import run

pytestmark = pytest.mark.ci_cpu
TRANSFORMER = {"dtype": "bfloat16"}
HALF = derive_config(PIPELINE_TEMPLATE, decoder={"dtype": "float16"}, diffusion_model={"transformer": TRANSFORMER})


def processor(monkeypatch: pytest.MonkeyPatch, **native: bool) -> None:
    monkeypatch.setattr(number_formats, "_supports", lambda name: native[name])


def test_the_line_names_the_formats_and_the_flags_that_avoid_them(monkeypatch):
    processor(monkeypatch, bf16=False, fp16=False)
    line = slow_formats(HALF, "cpu")
    assert line is not None
    assert "bfloat16 and float16" in line
    assert line.endswith(": --dtype float32 --pipeline.decoder.dtype float32")


def test_a_part_whose_format_the_processor_has_is_not_named(monkeypatch):
    processor(monkeypatch, bf16=True, fp16=False)
    line = slow_formats(HALF, "cpu")
    assert line is not None
    assert "bfloat16" not in line
    assert line.endswith(": --pipeline.decoder.dtype float32")


def test_experts_follow_the_runners_flag(monkeypatch):
    processor(monkeypatch, bf16=False, fp16=True)
    expert = ExpertConfig(sigma_low=0.9, transformer=HALF.diffusion_model.transformer)
    two = derive_config(HALF, diffusion_model={"high_noise": (expert,)}, decoder={"dtype": "float32"})
    assert str(slow_formats(two, "cpu")).endswith(": --dtype float32")


@pytest.mark.parametrize(
    ("config", "device", "native"), [(HALF, "cuda", False), (HALF, "cpu", True), (PIPELINE_TEMPLATE, "cpu", False)]
)
def test_nothing_is_said_where_all_is_well(monkeypatch, config, device, native):
    processor(monkeypatch, bf16=native, fp16=native)
    assert slow_formats(config, device) is None


def test_it_is_said_before_anything_is_loaded(monkeypatch, capsys):
    notices.reset()
    processor(monkeypatch, bf16=False, fp16=False)
    with pytest.raises(Exception, match="nowhere"):
        load_pipeline(derive_config(HALF, decoder={"checkpoint_path": "/nowhere.safetensors"}), device="cpu")
    assert "--pipeline.decoder.dtype float32" in capsys.readouterr().err


def test_it_is_said_of_a_run_that_begins_with_a_picture(monkeypatch, capsys, tmp_path):
    notices.reset()
    processor(monkeypatch, bf16=False, fp16=False)
    picture = tmp_path / "first.png"
    imageio.imwrite(picture, np.zeros((128, 128, 3), np.uint8))
    words = ["tiny-world", "--dtype", "bfloat16", "--image", str(picture), "--num-chunk", "1", "--device", "cpu"]
    assert run([*words, "--output", str(tmp_path / "out.mp4")], "flashdreams-run") == 0
    assert capsys.readouterr().err.count(": --dtype float32") == 1


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_pytorch_is_asked(monkeypatch, name, answer):
    known = {f"_is_mkldnn_{name}_supported": lambda: answer}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**known))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert number_formats._supports(name) is answer


def test_a_processor_of_which_pytorch_says_nothing_is_not_called_slow(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert number_formats._supports("bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert number_formats._supports("bf16")


def test_this_pytorch_says_it():
    """Else no processor is ever called slow."""
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)
    assert isinstance(torch.ops.mkldnn._is_mkldnn_fp16_supported(), bool)
