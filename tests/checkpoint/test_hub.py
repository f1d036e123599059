"""Downloads, against a stand-in for the hub with the faults of real networks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, match_checkpoint, open_checkpoint
from flashdreams.core.checkpoint import hub as hub_module
from hub_server import COMMIT
from small_model import meta_model, same, save_shards, untouched, weights

pytestmark = pytest.mark.ci_cpu

NAME = "model.safetensors"
SOURCE = f"hf://org/model/{NAME}"


def loads(source: str) -> bool:
    module = meta_model()
    load_checkpoint(module, source)
    return same(module, weights())


@pytest.mark.parametrize("form", ["org/model", "hf://org/model@main", SOURCE, "{}/org/model/blob/main/" + NAME])
def test_every_form_loads_and_a_second_time_from_the_cache(hub, form):
    source = form.format(hub.endpoint)
    assert loads(source) and loads(source)
    assert [span for span in hub.bodies(NAME) if span is None] == [None]  # one body, the rest are headers


def test_only_the_header_travels_until_the_bijection_is_decided(hub, cache):
    hub.files[NAME] += bytes(0)
    big = weights() | {"surplus": torch.zeros(3_000_000)}
    hub.files[NAME] = save(big)
    module = meta_model()
    with pytest.raises(CheckpointError, match="unexpected surplus"):
        load_checkpoint(module, SOURCE)
    assert hub.bodies(NAME) == ["bytes=0-1023", "bytes=0-1048575"] and untouched(module)
    assert match_checkpoint(meta_model(), SOURCE).summary == "matched 5/5, 1 unexpected"
    assert not list(cache.rglob("blobs/*"))


def test_headers_without_ranges_and_of_more_than_the_first_bytes(hub, monkeypatch):
    monkeypatch.setattr(hub_module, "_FIRST", 64)
    assert set(open_checkpoint(SOURCE).tensors) == set(weights())
    assert len(hub.bodies(NAME)) == 3
    hub.ranges = False
    assert set(open_checkpoint(SOURCE).tensors) == set(weights())


@pytest.fixture
def sharded(hub, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    save_shards(folder, weights(), 3)
    hub.files = {f"t/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return hub


@pytest.mark.parametrize("path", ["", "/t", "/t/model.safetensors", "/t/model.safetensors.index.json"])
def test_a_sharded_repository_whatever_part_of_it_is_named(sharded, path, capsys):
    """``model.safetensors`` is not there (404), only its index."""
    assert loads(f"hf://org/model{path}")
    assert ("stored in shards" in capsys.readouterr().err) == path.endswith("model.safetensors")


def test_an_index_that_names_shards_the_repository_lacks(sharded):
    del sharded.files["t/model-00002-of-00003.safetensors"]
    with pytest.raises(CheckpointError, match=r"names 3 shards, of which the repository lacks t/model-00002"):
        open_checkpoint("org/model")


def test_a_damaged_remote_header(hub):
    hub.files[NAME] = (10**10).to_bytes(8, "little") + hub.files[NAME][8:]
    with pytest.raises(CheckpointError, match=r"org/model/model\.safetensors .*header claims 10000000000 bytes"):
        open_checkpoint(SOURCE)


def test_pickles_are_downloaded_to_be_looked_into(hub, tmp_path):
    torch.save({"generator_ema": weights()}, tmp_path / "w.pt")
    hub.files = {"w.pt": (tmp_path / "w.pt").read_bytes()}
    assert loads("org/model") and loads("org/model#generator_ema")


def large(hub, size: int = 1_500_000) -> bytes:
    """A file that can stop in the middle."""
    hub.files[NAME] = save(weights(), {"note": "x" * size})
    return hub.files[NAME]


def test_a_dropped_connection_goes_on_where_it_stopped(hub):
    size = len(large(hub))
    opened = open_checkpoint(SOURCE)
    hub.drop_after = 500_000
    opened.fetch()
    assert hub.bodies(NAME)[-2:] == [None, "bytes=500000-"]
    assert opened.files[0].stat().st_size == size


def test_a_stalled_connection_is_given_up_and_resumed(hub, monkeypatch):
    large(hub)
    opened = open_checkpoint(SOURCE)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.stall_after = 400_000
    opened.fetch()
    assert hub.bodies(NAME)[-2:] == [None, "bytes=400000-"]


def test_a_server_without_ranges_sends_all_of_it_again(hub):
    whole = large(hub)
    opened = open_checkpoint(SOURCE)
    hub.ranges, hub.drop_after = False, 300_000
    opened.fetch()
    assert opened.files[0].read_bytes() == whole


def test_a_killed_download_is_resumed_by_the_next_process(hub, cache, tmp_path):
    whole = large(hub, 24_000_000)  # beyond the library's piece of 10 MiB
    hub.stall_after = 15_000_000
    program = (
        "from pathlib import Path\nfrom flashdreams.core.checkpoint import hub\n"
        f"hub.download(hub.list_files('org/model', 'main'), ['{NAME}'])"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        "HF_HOME": str(tmp_path),
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE)
    partial: list = []
    deadline = time.monotonic() + 120
    while not (partial and partial[0].stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        partial = list(cache.rglob("*.partial"))
        threading.Event().wait(0.05)
    process.kill()
    process.wait()
    assert partial, process.stderr.read().decode()
    arrived = partial[0].stat().st_size
    hub.resume.set()
    opened = open_checkpoint(SOURCE)
    opened.fetch()
    assert hub.bodies(NAME)[-1] == f"bytes={arrived}-" and 0 < arrived < len(whole)
    assert opened.files[0].read_bytes() == whole and not list(cache.rglob("*.partial"))


def test_a_partial_file_of_more_than_the_whole_is_thrown_away(hub, cache):
    listing = hub_module.list_files("org/model", "main")
    partial = hub_module._partial(cache, listing, NAME)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(10**6))
    assert loads(SOURCE)


def test_a_corrupted_body_is_fetched_again_and_twice_is_an_error(hub, cache, capsys):
    opened = open_checkpoint(SOURCE)
    hub.corrupt = 1
    opened.fetch()
    assert opened.files[0].read_bytes() == hub.files[NAME]
    assert "arrived damaged; fetching it again" in capsys.readouterr().err
    hub.files["other.safetensors"] = save(weights(1))
    opened = open_checkpoint("hf://org/model/other.safetensors")
    hub.corrupt = 2
    with pytest.raises(CheckpointError, match="other.safetensors arrived damaged twice"):
        opened.fetch()
    assert not list(cache.rglob("*.partial")) and len(list(cache.rglob("other.safetensors"))) == 0


def test_several_that_want_one_file_fetch_it_once(hub):
    large(hub)
    listing = hub_module.list_files("org/model", "main")
    paths: list = []
    threads = [
        threading.Thread(target=lambda: paths.append(hub_module.download(listing, [NAME])[0].read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert paths == [hub.files[NAME]] * 4
    assert hub.bodies(NAME) == [None]


@pytest.mark.parametrize("name", ["w.gguf", "w.pth", "w.safetensors"])
def test_what_is_no_weights_is_not_downloaded_to_find_out(hub, cache, name):
    hub.files = {name: b"GGUF\3\0\0\0" + bytes(5000)}
    with pytest.raises(CheckpointError, match=rf"org/model/{name} \(5008 bytes\) is a GGUF file"):
        open_checkpoint(f"hf://org/model/{name}")
    assert hub.bodies(name) == ["bytes=0-1023"] and not list(cache.rglob("blobs/*"))


def test_space_is_checked_before_the_first_byte_and_the_folder_named(hub, cache):
    hub.sizes[NAME] = 10**15
    listing = hub_module.list_files("org/model", "main")
    with pytest.raises(CheckpointError, match=rf"needs 931322.6 GiB more in the cache folder {cache}.*set HF_HOME"):
        hub_module.download(listing, [NAME])
    assert hub.bodies(NAME) == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "there is no model repository org/model, or it is private; check the spelling"),
        (401, "RepoNotFound", "there is no model repository org/model, or it is private.*hf auth login"),
        (401, None, "wants to know who asks for org/model .*no token is set: log in with `hf auth login`"),
        (403, "GatedRepo", "org/model is gated: accept its terms at http://127.*/org/model, then.*hf auth login"),
        (404, "RevisionNotFound", "org/model has no revision 'main'"),
        (403, None, "access to org/model is forbidden"),
        (429, None, r"takes no more requests for now \(org/model, status 429\); wait some minutes"),
        (500, None, "answered org/model with status 500; try again later"),
    ],
)
def test_refusals_say_what_to_do(hub, status, code, message):
    hub.status, hub.error_code = status, code
    module = meta_model()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(module, "org/model")
    assert untouched(module)


def test_a_refusal_between_listing_and_download(hub):
    opened = open_checkpoint(SOURCE)
    hub.status, hub.retry_after = 429, "0"
    with pytest.raises(CheckpointError, match=r"model\.safetensors, status 429\); wait some minutes"):
        opened.fetch()
    hub.status = 401
    with pytest.raises(CheckpointError, match="no token is set"):
        opened.fetch()


def test_the_token_is_the_hub_librarys(hub, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(CheckpointError, match="no token is set: log in") as error:
        open_checkpoint("org/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match="the token in use may not see it") as error:
        open_checkpoint("org/model")
    assert "hf_wrong" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert loads("org/model")


def test_a_name_that_is_not_there_gets_the_nearest(hub):
    with pytest.raises(CheckpointError, match=r"org/model has no modl\.safetensors; nearest: model\.safetensors"):
        open_checkpoint("hf://org/model/modl.safetensors")
    with pytest.raises(CheckpointError, match="there is no model repository org/modle"):
        open_checkpoint("org/modle")


def test_offline_uses_the_cache_and_says_what_is_not_in_it(hub, monkeypatch):
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match="not in the cache folder, and HF_HUB_OFFLINE"):
            open_checkpoint("org/model")
    assert loads("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    seen = len(hub.log)
    assert loads("org/model") and loads(SOURCE)
    assert len(hub.log) == seen


def test_a_hub_that_cannot_be_reached(hub, monkeypatch, capsys):
    assert loads("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert loads("org/model")
    assert f"cannot be reached; using the cached copy {COMMIT[:8]}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="could not be fetched from http://127.0.0.1:9 .*check the network"):
        open_checkpoint("org/other")


def test_a_cache_that_cannot_be_written_falls_back_and_says_so(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/none/huggingface/hub")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert loads("org/model")
    assert capsys.readouterr().err.count("the cache folder /proc/none/huggingface/hub cannot be written") == 1
