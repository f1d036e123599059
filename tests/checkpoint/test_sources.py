"""What may be written for a checkpoint, which files that means, and one clear error for everything else."""

from __future__ import annotations

import json
import os

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, open_checkpoint, parse_source
from flashdreams.core.checkpoint.layout import choose
from flashdreams.core.checkpoint.sources import HubSource, LocalSource, RandomSource
from small_model import meta_model, same, save_shards, untouched, weights

pytestmark = pytest.mark.ci_cpu

HUB = constants.ENDPOINT


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/repo", HubSource("org/repo")),
        ("org/repo@v1", HubSource("org/repo", "", "v1")),
        ("org/Repo-14B.v2#ema", HubSource("org/Repo-14B.v2", "", "main", "ema")),
        ("hf://org/repo", HubSource("org/repo")),
        ("hf://org/repo/sub/w.safetensors", HubSource("org/repo", "sub/w.safetensors")),
        ("hf://org/repo/sub/w.safetensors@v1", HubSource("org/repo", "sub/w.safetensors", "v1")),
        ("hf://org/repo@v1/sub/w.safetensors", HubSource("org/repo", "sub/w.safetensors", "v1")),
        ("hf://org/repo@refs/pr/3/w.pt", HubSource("org/repo", "w.pt", "refs/pr/3")),
        ("hf://org/repo/w.pt@refs/pr/3", HubSource("org/repo", "w.pt", "refs/pr/3")),
        ("hf://org/repo/w.pt#generator", HubSource("org/repo", "w.pt", "main", "generator")),
        (f"{HUB}/org/repo", HubSource("org/repo")),
        (f"{HUB}/org/repo/tree/main", HubSource("org/repo")),
        (f"{HUB}/org/repo/tree/main/transformer", HubSource("org/repo", "transformer")),
        (f"{HUB}/org/repo/blob/main/a/w.safetensors", HubSource("org/repo", "a/w.safetensors")),
        (f"{HUB}/org/repo/resolve/v1/w.pth?download=true", HubSource("org/repo", "w.pth", "v1")),
        (f"{HUB}/org/repo/blob/refs%2Fpr%2F1/w.pth", HubSource("org/repo", "w.pth", "refs/pr/1")),
        (f"{HUB}/org/repo/blob/refs/pr/1/w.pth", HubSource("org/repo", "w.pth", "refs/pr/1")),
        ("random:0", RandomSource(0)),
        ("random:18446744073709551615", RandomSource(2**64 - 1)),
    ],
)
def test_forms(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    ["", " ", "a\0b", "random:", "random:-1", "random:1.5", "random:18446744073709551616", "s3://bucket/key", "hf://",
     "hf://org", "hf://org/repo/../../etc/passwd", "hf://org/repo/a//b", "hf://org/repo@", "hf://datasets/org/repo",
     "hf://org/repo/x@../../y", f"{HUB}/org", f"{HUB}/datasets/org/repo", f"{HUB}/org/repo/commit/abc",
     "http://127.0.0.1:1/org/repo/resolve/main/w.safetensors", "hf://org/re--po/x"],
)  # fmt: skip
def test_what_is_no_source_says_what_one_is(text):
    with pytest.raises(CheckpointError, match="expected|only links to|no model repository"):
        parse_source(text)


def test_local_things_come_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/repo") == HubSource("org/repo")
    (tmp_path / "org/repo").mkdir(parents=True)
    assert isinstance(parse_source("org/repo"), LocalSource)
    (tmp_path / "a#b").write_bytes(b"")
    assert parse_source("a#b").entry is None
    assert parse_source("a.pt#b") == LocalSource(parse_source("a.pt").path, "b")
    for absent in ("weights/model.safetensors", "./org/name", "~/org", "/org/name", "runs/step_100.pt"):
        assert isinstance(parse_source(absent), LocalSource)


def test_package_files():
    assert parse_source("package://flashdreams/_version.py").path.is_file()
    with pytest.raises(CheckpointError, match="no package 'no_such_package'"):
        parse_source("package://no_such_package/w.safetensors")


@pytest.mark.parametrize(
    ("names", "path", "files"),
    [
        (["model.safetensors", "config.json"], "", ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], "", ["model.safetensors"]),
        (["w.pth", "README.md"], "", ["w.pth"]),
        (["m.fp16.safetensors", "m.safetensors"], "", ["m.safetensors"]),
        (["m.fp16.safetensors"], "", ["m.fp16.safetensors"]),
        (["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"], "",
         ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"]),
        (["t/m.safetensors", "vae/m.safetensors"], "vae", ["vae/m.safetensors"]),
        (["t/m.safetensors", "config.json"], "", ["t/m.safetensors"]),
        (["a.pt", "b.pt"], "b.pt", ["b.pt"]),
        (["m.safetensors", "._m.safetensors"], "", ["m.safetensors"]),
        (["m.pt", "optimizer.pt", "scheduler.pt", "rng_state_0.pt"], "", ["m.pt"]),
        (["optimizer.pt"], "", ["optimizer.pt"]),
    ],
)  # fmt: skip
def test_the_weights_of_a_folder(names, path, files):
    assert list(choose(names, path, "here").files) == files


@pytest.mark.parametrize(
    ("names", "path", "index"),
    [
        (["m.safetensors.index.json", "m-00001-of-00001.safetensors"], "", "m.safetensors.index.json"),
        (["m.safetensors.index.json", "m.bin.index.json", "m.bin"], "", "m.safetensors.index.json"),
        (["t/m.safetensors.index.json"], "t/m.safetensors", "t/m.safetensors.index.json"),
        (["t/m.safetensors.index.json"], "t/m.safetensors.index.json", "t/m.safetensors.index.json"),
        (["m.bin.index.json", "m-00001-of-00001.bin"], "", "m.bin.index.json"),
    ],
)
def test_the_index_of_shards(names, path, index):
    assert choose(names, path, "here").index == index


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [
        ([], "", "has no weights"),
        (["README.md", "m.gguf"], "", r"has no weights .*it holds README.md, m.gguf"),
        (
            ["a.safetensors", "b.safetensors"],
            "",
            r"several files of weights \(a.safetensors, b.safetensors\); name one",
        ),
        (["t/m.safetensors", "vae/m.safetensors"], "", r"weights in several folders \(t, vae\); name one"),
        (["a-00001-of-00003.bin", "a-00003-of-00003.bin"], "", "2 of 3 shards of a; number 2 is missing"),
        (["model.safetensors"], "modle.safetensors", "has no modle.safetensors; nearest: model.safetensors"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "", "several files of weights"),
    ],
)
def test_a_folder_that_does_not_say_which(names, path, message):
    with pytest.raises(CheckpointError, match=message):
        choose(names, path, "here")


def test_a_file_that_was_split_is_found_by_its_index(tmp_path, capsys):
    save_shards(tmp_path, weights())
    module = meta_model()
    load_checkpoint(module, str(tmp_path / "model.safetensors"))
    assert same(module, weights())
    assert "stored in shards" in capsys.readouterr().err


def test_pickled_shards(tmp_path):
    state = weights()
    table = {}
    for number, keys in enumerate((list(state)[:2], list(state)[2:])):
        torch.save({key: state[key] for key in keys}, tmp_path / f"p-{number}.bin")
        table |= dict.fromkeys(keys, f"p-{number}.bin")
    (tmp_path / "p.bin.index.json").write_text(json.dumps({"weight_map": table}))
    module = meta_model()
    load_checkpoint(module, str(tmp_path))
    assert same(module, state)


def test_a_diffusers_pipeline_folder(tmp_path):
    for name in ("transformer", "vae"):
        (tmp_path / name).mkdir()
        save_file(weights(), tmp_path / name / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"several folders \(transformer, vae\); name one"):
        open_checkpoint(tmp_path)
    assert len(open_checkpoint(tmp_path / "vae").tensors) == 5


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("gone.safetensors", r"names 1 shards, of which 1 are not there: gone\.safetensors"),
        ("../outside.safetensors", "not a file beside the index"),
        ("/etc/passwd", "not a file beside the index"),
        ("..\\x.safetensors", "not a file beside the index"),
        ("", "not a file beside the index"),
        ("..", "not a file beside the index"),
        ("a\0.safetensors", "not a file beside the index"),
        ("model.safetensors.index.json", "no file of weights"),
        ("config.json", "no file of weights"),
        (7, "which is no file name"),
        (None, "which is no file name"),
    ],
)
def test_an_index_that_leads_astray(tmp_path, shard, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    module = meta_model()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(module, str(tmp_path))
    assert untouched(module)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"a": 1, "a": 2}', '"x"', "{" * 100000,
     '{"weight_map": {"a": "x.bin", "a": "y.bin"}}'],
)  # fmt: skip
def test_a_damaged_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index of shards|is not a whole"):
        open_checkpoint(tmp_path)


def test_keys_and_shards_that_contradict_the_index(tmp_path):
    state = weights()
    save_file(state, tmp_path / "one.safetensors")
    save_file({"a.bias": state["a.bias"]}, tmp_path / "two.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "one.safetensors", "b.bias": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match="a.bias stands in one.safetensors and in two.safetensors"):
        open_checkpoint(tmp_path)
    save_file({"extra": state["a.bias"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.bias is in two\.safetensors, but it is in one\.safetensors"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"gone": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone is in one\.safetensors, but it is in none"):
        open_checkpoint(tmp_path)


def test_a_damaged_shard_is_named(tmp_path):
    second = save_shards(tmp_path, weights())[1]
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors .*the last 1 are missing"):
        load_checkpoint(meta_model(), str(tmp_path))


def test_links_pipes_devices_and_folders(tmp_path):
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, message in [
        (loop, "link that leads nowhere"),
        (tmp_path / "dangling.safetensors", "link that leads nowhere"),
        (tmp_path / "pipe.safetensors", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "absent.safetensors", "no checkpoint at"),
        ("x" * 5000, "no checkpoint at|cannot be read"),
        (str(tmp_path / "w") + "é" * 300, "no checkpoint at|cannot be read"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(name))
    circle = tmp_path / "folder"
    circle.mkdir()
    (circle / "again").symlink_to(circle)
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(circle)
    (circle / "w.safetensors").symlink_to(tmp_path / "real.bin")
    save_file(weights(), tmp_path / "real.bin")
    module = meta_model()
    load_checkpoint(module, str(circle))  # as in the hub's cache, whose files are links to blobs
    assert same(module, weights())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"\(0 bytes\) is not a whole safetensors file or pickle: it is empty"),
        (bytes(5000), "begins with zeros only, as a download that was interrupted"),
        (b"hello, this is text", "it begins with b'hello"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"<!DOCTYPE html><html><title>Log in</title>", "a web page, not weights: 'Log in'"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "a web page, not weights: 'AccessDenied'"),
        (b'{"error": "Invalid credentials"}', "not an index of shards"),
        (b"\x89HDF\r\n\x1a\n....", "an HDF5 file"),
        (b"\x1f\x8b\x08....", "a gzip archive"),
        (b"\x93NUMPY\x01\x00....", "a NumPy array"),
        (b"PK\x03\x04....", "not a whole PyTorch file"),
        (b"\x80\x02}q\x00.", "not a whole file of weights"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 123456\n",
            "Git LFS pointer of 69 bytes.*123456",
        ),
    ],
)
@pytest.mark.parametrize("ending", [".safetensors", ".pth", ""])
def test_the_first_bytes_tell_what_a_file_is_whatever_its_name(tmp_path, data, message, ending):
    path = tmp_path / f"w{ending}"
    path.write_bytes(data)
    module = meta_model()
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(module, str(path))
    assert str(path) in str(error.value) and untouched(module)


def test_renamed_files_are_read_as_what_they_are(tmp_path, capsys):
    save_file(weights(), tmp_path / "w.pth")
    torch.save(weights(), tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        module = meta_model()
        load_checkpoint(module, str(tmp_path / name))
        assert same(module, weights())
    said = capsys.readouterr().err
    assert "w.pth is a safetensors file in spite of its name" in said
    assert "w.safetensors is a file of torch.save in spite of its name" in said


def test_unreadable_files_and_folders(tmp_path, monkeypatch):
    save_file(weights(), tmp_path / "w.safetensors")
    from pathlib import Path

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(tmp_path / "w.safetensors")
    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(tmp_path)
