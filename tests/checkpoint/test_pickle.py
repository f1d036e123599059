"""Files of torch.save: weights only, nothing run, the right state dict found."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict

import pytest
import torch

from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, open_checkpoint
from small_model import meta_model, same, untouched, weights

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def file(tmp_path):
    return tmp_path / "w.pt"


class Runs:
    """Runs a command when unpickled by the usual rules."""

    def __init__(self, function, *words):
        self.call = function, words

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_formats_load(file, zipped, dtype):
    torch.save(weights(), file, _use_new_zipfile_serialization=zipped)
    module = meta_model()
    load_checkpoint(module, str(file), dtype=dtype)
    assert same(module, {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights().items()})


def test_views_transposed_tied_empty_and_parameter_tensors(file):
    base = torch.arange(12.0)
    state = weights() | {"a.weight": base.view(3, 4).T, "a.bias": base[4:8]}
    state["b.weight"] = torch.nn.Parameter(state["b.weight"])
    torch.save(OrderedDict(state), file)
    module = meta_model()
    load_checkpoint(module, str(file))
    assert torch.equal(module.a.weight, base.view(3, 4).T) and module.a.weight.is_contiguous()
    assert torch.equal(module.a.bias, base[4:8])
    torch.save({"empty": torch.zeros(0, 3), "one": torch.ones(())}, file)
    opened = open_checkpoint(file)
    assert opened.read("empty").shape == (0, 3) and opened.read("one") == 1


@pytest.mark.parametrize("zipped", [True, False, None])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {}"), r"posix\.system"),
        ((subprocess.check_output, ["touch", "{}"]), r"(subprocess|commands)\.check_output"),
        ((eval, "open('{}', 'w')"), r"(builtins|__builtin__)\.eval(, eval)?|eval"),
    ],
)
def test_a_pickle_that_runs_commands_is_refused_by_name_and_runs_nothing(file, tmp_path, zipped, call, name):
    trace = tmp_path / "ran"
    function, words = call
    words = words.format(trace) if isinstance(words, str) else [word.format(trace) for word in words]
    content = {**weights(), "x": Runs(function, words)}
    if zipped is None:
        file.write_bytes(pickle.dumps(content["x"]))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    module = meta_model()
    with pytest.raises(CheckpointError, match=f"({name}), which only running code.*do not trust it"):
        load_checkpoint(module, str(file))
    assert not trace.exists() and untouched(module)


def test_a_harmless_object_is_refused_by_name_with_a_conversion_that_works(file, tmp_path):
    torch.save({"args": argparse.Namespace(lr=1), "model": weights()}, file)
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace.*add_safe_globals") as error:
        load_checkpoint(meta_model(), str(file))
    command = str(error.value).partition('python -c "')[2].removesuffix('"')
    try:
        exec(command.replace(file.name, str(file)).replace("weights.pt", str(tmp_path / "weights.pt")))
    finally:
        torch.serialization.clear_safe_globals()
    module = meta_model()
    load_checkpoint(module, str(tmp_path / "weights.pt"))
    assert same(module, weights())


@pytest.mark.parametrize(
    ("content", "entry", "seed"),
    [
        ({"generator": 1, "generator_ema": 2}, None, 2),
        ({"generator": 1, "critic": 2, "step": 5}, None, 1),
        ({"model": 1, "ema": {"decay": 0.9, "state_dict": 3}}, None, 3),
        ({"model": 1, "model_ema": 4}, "model", 1),
        ({"state_dict": {"module": 6}}, None, 6),
        ({"state_dict": {"module": 6, "net": 7}}, "state_dict/net", 7),
        ({"anything": 8, "epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}, None, 8),
    ],
)
def test_the_state_dict_inside_a_dump(file, capsys, content, entry, seed):
    def filled(value):
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return weights(value) if type(value) is int and value not in (5,) else value

    content = filled({key: value for key, value in content.items() if key not in ("epoch", "step")})
    torch.save(content | {"epoch": 3}, file)
    module = meta_model()
    load_checkpoint(module, f"{file}#{entry}" if entry else str(file))
    assert same(module, weights(seed))
    assert ("took" in capsys.readouterr().err) == (entry is None)


def test_several_state_dicts_of_equal_standing_are_not_guessed(file):
    torch.save({"left": weights(1), "right": weights(2)}, file)
    with pytest.raises(CheckpointError, match=r"several state dicts \(left, right\); say which: w\.pt#left"):
        load_checkpoint(meta_model(), str(file))


def test_only_the_chosen_tensors_are_read(file, monkeypatch):
    torch.save({"generator_ema": weights(), "optimizer": {"m": torch.ones(1000)}}, file)
    assert set(open_checkpoint(file).tensors) == set(weights())


def test_entries_that_are_no_tensors_are_said_to_be_left_out(file, capsys):
    torch.save(weights() | {"version": 3}, file)
    load_checkpoint(meta_model(), str(file))
    assert "1 entries are no tensors and are left out: version" in capsys.readouterr().err


def test_cut_off_and_damaged_files(file):
    torch.save(weights(), file)
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:-1], whole[:30], whole[:200] + bytes(200) + whole[400:]):
        file.write_bytes(data)
        module = meta_model()
        with pytest.raises(CheckpointError, match="whole|cut off|damaged"):
            load_checkpoint(module, str(file))
        assert untouched(module)


def test_zip_archives_of_other_kinds(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.safetensors", b"x")
    with pytest.raises(CheckpointError, match="a zip archive, but not one of torch.save"):
        load_checkpoint(meta_model(), str(file))
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"program/{name}", b"x")
    with pytest.raises(CheckpointError, match="TorchScript program"):
        load_checkpoint(meta_model(), str(file))


def test_a_compressed_archive_is_read_whole(file):
    torch.save(weights(), file)
    records = {}
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    module = meta_model()
    load_checkpoint(module, str(file))
    assert same(module, weights())


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, [torch.ones(3)], "text", {}])
def test_files_without_named_tensors(file, content):
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        load_checkpoint(meta_model(), str(file))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_that_stands_alone_has_a_name_of_ours(file, zipped):
    """Embeddings are published so; a state-dict transform gives them the module's own name."""
    torch.save(torch.arange(6.0).view(2, 3), file, _use_new_zipfile_serialization=zipped)
    opened = open_checkpoint(file)
    assert list(opened.tensors) == ["tensor"] and torch.equal(opened.read("tensor"), torch.arange(6.0).view(2, 3))
    with pytest.raises(CheckpointError, match="does not fit SmallModel"):
        load_checkpoint(meta_model(), str(file))


def test_a_dict_that_holds_itself(file):
    content: dict = {"step": 1}
    content["model"] = content
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        load_checkpoint(meta_model(), str(file))
