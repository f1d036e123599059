"""Cases B08, B12, B13 and B14 of public bug reports, by the command line's flag and by the loader."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile

import pytest
import torch
from safetensors.torch import load_file

from cli import TEMPLATE
from flashdreams.core.caches import cache_folder
from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, open_checkpoint
from flashdreams.core.checkpoint.meta import parameters_on_meta
from flashdreams.infra.runner import Runner
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.scripts.run import main

pytestmark = pytest.mark.ci_cpu

SIZES = {"dim": 24, "ffn_dim": 48, "num_heads": 2, "num_layers": 2, "text_dim": 16, "text_len": 8, "freq_dim": 16}


def network():
    with parameters_on_meta():
        return WanNetworkConfig(**SIZES).setup()


def without_prefix(state):
    return {key.removeprefix("model."): value for key, value in state.items()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("B08/wan-q8_0.gguf", ["(194 bytes) is a GGUF file", "use the safetensors file of the same model"]),
        ("B08/wan-q8_0-renamed.safetensors", ["(194 bytes) is a GGUF file", "use the safetensors file"]),
        ("B12/lfs_pointer.safetensors", ["Git LFS pointer of 135 bytes", "have 2838276216 bytes", "git lfs pull"]),
        ("B12/lfs_pointer.pth", ["Git LFS pointer of 135 bytes", "have 5676070424 bytes", "git lfs pull"]),
        ("B12/login_page.safetensors", ["(80 bytes) is a web page", "Sign in", "log in"]),
        ("B13/train_dump_namespace.pt", ["holds argparse.Namespace", "nothing was run", "add_safe_globals"]),
        ("B13/train_dump_clean.pt#nothing", ["no entry 'nothing'", "step, optimizer, generator, generator_ema"]),
    ],
)
def test_refused_before_any_work(cases, name, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", TEMPLATE)
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("weights were loaded before the refusal"))
    output = tmp_path / "new" / "video.mp4"
    words = ["template", "--prompt", "x", "--ckpt-path", str(cases / name), "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["flashdreams-run", *words])
    assert main() == 2
    text = capsys.readouterr().err
    assert text.count("error:") == 1 and "Traceback" not in text and not output.parent.exists()
    assert all(part in text for part in (name.partition("#")[0], *said)), text
    with pytest.raises(CheckpointError):
        open_checkpoint(str(cases / name))


def test_b13_the_averaged_weights_of_a_clean_dump(cases, capsys):
    module = network()
    source = str(cases / "B13/train_dump_clean.pt")
    load_checkpoint(module, source, transform=without_prefix, dtype=torch.bfloat16)
    base = load_file(cases / "base_mini_wan.safetensors")
    state = module.state_dict()
    assert state.keys() == base.keys()
    assert all(torch.equal(state[key], base[key].bfloat16()) for key in base)
    assert "took 'generator_ema' of step, optimizer, generator, generator_ema" in capsys.readouterr().err
    assert not any("exp_avg" in key for key in open_checkpoint(source).tensors)


def test_b13_weights_that_are_all_zero_are_said_to_be(cases, capsys):
    source = f"{cases / 'B13/train_dump_clean.pt'}#generator"
    load_checkpoint(network(), source, transform=without_prefix)
    said = capsys.readouterr().err
    assert f"every weight of {source} is zero" in said and "took" not in said


@pytest.fixture
def nameless(tmp_path, monkeypatch):
    """A user id without a name, without a home, as in a container."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("USER", "LOGNAME", "XDG_CACHE_HOME", "FLASHDREAMS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_b14_caches_fall_back_and_say_so_once(nameless, cases, capsys):
    module = network()
    report = load_checkpoint(module, str(cases / "base_mini_wan.safetensors"))
    assert report.digest.startswith("sha256:") and cache_folder("digests").is_relative_to(nameless)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "/proc/none/.cache/flashdreams cannot be written; using" in said[0] and "FLASHDREAMS_CACHE" in said[0]
    assert stat.S_IMODE((nameless / f"flashdreams-{os.getuid()}").stat().st_mode) == 0o700


def test_b14_the_variable_moves_the_caches(nameless, monkeypatch, capsys):
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(nameless / "mine"))
    assert cache_folder("digests") == nameless / "mine" / "digests" and not capsys.readouterr().err


def test_b14_a_stand_in_that_another_user_laid_out_is_not_used(nameless):
    (nameless / "elsewhere").mkdir()
    (nameless / f"flashdreams-{os.getuid()}").symlink_to(nameless / "elsewhere")
    assert not cache_folder("digests").resolve().is_relative_to(nameless / "elsewhere")
