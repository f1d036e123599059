"""From prompts to embeddings: the text encoder's life, embeddings kept on disk, and embeddings given in a file."""

from __future__ import annotations

import errno
import gc
import tempfile
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.core import notices
from flashdreams.core.caches import cache_folder
from flashdreams.core.checkpoint import digest
from flashdreams.infra import embedding_store, loading, prompts
from flashdreams.infra.embeds import Embedding
from flashdreams.infra.prompts import PromptEncoder
from flashdreams.recipes.wan import text_encoder
from flashdreams.recipes.wan.umt5 import UMT5Encoder
from flashdreams.recipes.wan.umt5_config import UMT5Config
from hub_server import FakeHub
from small_umt5 import SMALL, Letters, random_encoder

pytestmark = pytest.mark.ci_cpu

LIVES = [(residence, kept) for residence in ("device", "cpu", "transient") for kept in (False, True)]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(text_encoder, "load_tokenizer", lambda *_: Letters())
    notices.reset()


@pytest.fixture
def config(tmp_path: Path) -> UMT5Config:
    """The small umT5 with a checkpoint, and a tokenizer beside it."""
    save_file(random_encoder().state_dict(), tmp_path / "umt5.safetensors")
    (tmp_path / "tokenizer.json").write_text("letters")
    return replace(SMALL, checkpoint_path=str(tmp_path / "umt5.safetensors"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Text encoders that were made, whether or not they are still there."""
    found: list[weakref.ref] = []
    setup = loading.setup_module

    def recorded(config: object, device: str) -> object:
        module = setup(config, device)
        if isinstance(config, UMT5Config):
            found.append(weakref.ref(module))
        return module

    monkeypatch.setattr(loading, "setup_module", recorded)
    return found


def reference(config: UMT5Config, prompts: list[str]) -> Tensor:
    """Every prompt by itself, through a text encoder that knows nothing of this file's matter."""
    encoder = config.setup()
    return torch.cat([encoder.encode([prompt]) for prompt in prompts])


def kept() -> list[Path]:
    return sorted(cache_folder("embeddings").iterdir())


@pytest.mark.parametrize(("residence", "cached"), LIVES)
def test_embeddings_are_the_same_wherever_the_encoder_lives(config, residence, cached):
    want = reference(config, ["a cat", "", "two dogs run"])
    encoder = PromptEncoder(replace(config, residence=residence, cache_embeddings=cached))
    slots = encoder.slots(["a cat", "two dogs run"], "")
    if residence == "device" and not cached:  # a batch at once, as equal as a batch is
        torch.testing.assert_close(slots["text"], want[[0, 2]], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(slots["text"], want[[0, 2]])
    assert torch.equal(slots["negative_text"], want[[1, 1]])
    assert slots.keys() == {"text", "negative_text"}
    for prompt, expected in zip(["a cat", "", "two dogs run"], want, strict=True):
        assert torch.equal(encoder.encode([prompt])[0], expected)
    assert encoder.slots(["a cat"]).keys() == {"text"}


@pytest.mark.parametrize(("residence", "cached"), LIVES)
def test_how_long_the_encoder_lives(config, made, residence, cached):
    encoder = PromptEncoder(replace(config, residence=residence, cache_embeddings=cached))
    assert len(made) == (residence == "device" and not cached)
    encoder.slots(["a cat", "two dogs run"], "blurry")
    alive = [ref() for ref in made]
    assert len(alive) == 1, "one life for all prompts"
    assert (alive[0] is None) == (residence == "transient")
    del alive
    encoder.encode(["a cat"])
    assert len(made) == 1, "a prompt that was used is remembered, or the encoder is there"
    encoder.encode(["a horse"])
    assert len(made) == (2 if residence == "transient" else 1)


def test_a_transient_encoder_leaves_no_parameter_behind(config):
    def parameters() -> int:
        gc.collect()
        modules = [each for each in gc.get_objects() if type(each) is UMT5Encoder]
        return sum(weight.numel() for module in modules for weight in module.parameters())

    before = parameters()
    encoder = PromptEncoder(replace(config, residence="device"))
    assert parameters() == before, "nothing is loaded before a prompt comes"
    encoder.encode(["a cat"])
    assert parameters() - before == sum(weight.numel() for weight in random_encoder().parameters())
    del encoder
    encoder = PromptEncoder(config)
    encoder.encode(["another cat"])
    assert parameters() == before


def test_only_the_last_prompts_are_remembered(config, made, monkeypatch):
    monkeypatch.setattr(prompts, "_REMEMBERED", 2)
    encoder = PromptEncoder(replace(config, cache_embeddings=False))
    want = reference(config, ["a", "b", "c"])
    made.clear()
    assert torch.equal(encoder.encode(["a", "b", "c"]), want)
    encoder.encode(["b"])
    encoder.encode(["c", "b"])
    assert len(made) == 1
    assert torch.equal(encoder.encode(["a"]), want[:1])
    assert len(made) == 2


def test_a_prompt_kept_on_disk_needs_no_encoder_and_no_hashing(config, made, monkeypatch):
    first = PromptEncoder(config)
    want = first.slots(["a cat"], "blurry")
    assert first.checkpoint_digest == config.setup().checkpoint_digest
    made.clear()
    monkeypatch.setattr(digest, "hash_file", lambda path: pytest.fail(f"{path} was hashed again"))
    second = PromptEncoder(config)
    got = second.slots(["a cat"], "blurry")
    assert all(torch.equal(got[name], want[name]) for name in want) and got.keys() == want.keys()
    assert second.checkpoint_digest == first.checkpoint_digest
    assert not made


def test_the_digest_is_that_of_the_loaded_checkpoint_also_for_shards_seeds_and_none(config, tmp_path):
    assert PromptEncoder(replace(config, checkpoint_path=None)).checkpoint_digest is None
    assert PromptEncoder(replace(config, checkpoint_path="random:3")).checkpoint_digest == "random:3"
    from small_model import save_shards

    (tmp_path / "shards").mkdir()
    save_shards(tmp_path / "shards", random_encoder().state_dict(), 3)
    (tmp_path / "shards" / "tokenizer.json").write_text("letters")
    sharded = replace(config, checkpoint_path=str(tmp_path / "shards"))
    assert PromptEncoder(sharded).checkpoint_digest == sharded.setup().checkpoint_digest


def test_of_a_file_on_the_hub_only_the_header_is_fetched_to_know_its_digest(config, monkeypatch, tmp_path):
    from huggingface_hub import constants

    file = Path(config.checkpoint_path)
    with FakeHub({file.name: file.read_bytes()}) as hub:
        pages = "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + pages, "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        remote = PromptEncoder(replace(config, checkpoint_path="org/model", tokenizer=str(file.parent)))
        assert remote.checkpoint_digest == PromptEncoder(config).checkpoint_digest
        assert None not in hub.bodies(file.name), "no whole file"


@pytest.mark.parametrize("change", ["weights", "tokenizer", "text_len", "dtype", "prompt", "threads", "entry"])
def test_what_changes_the_embeddings_is_never_answered_from_disk(config, made, change, tmp_path, monkeypatch):
    PromptEncoder(config).encode(["a cat"])
    made.clear()
    prompt = "a cat"
    if change == "weights":
        save_file(random_encoder(seed=1).state_dict(), tmp_path / "umt5.safetensors")
    elif change == "tokenizer":
        (tmp_path / "tokenizer.json").write_text("other letters")
    elif change == "text_len":
        config = replace(config, text_len=5)
    elif change == "dtype":
        config = replace(config, dtype="bfloat16")
    elif change == "prompt":
        prompt = "a cat "
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    elif change == "entry":
        torch.save({"a": random_encoder().state_dict(), "b": random_encoder(1).state_dict()}, tmp_path / "two.pt")
        config = replace(config, checkpoint_path=f"{tmp_path}/two.pt#a")
        PromptEncoder(config).encode([prompt])
        config = replace(config, checkpoint_path=f"{tmp_path}/two.pt#b")
        made.clear()
    got = PromptEncoder(config).encode([prompt])
    assert len(made) == 1
    assert torch.equal(got, reference(config, [prompt]))
    PromptEncoder(config).encode([prompt])
    assert len(made) == 2, "and then it is (the second is the reference's)"


def test_where_the_weights_lie_and_where_the_encoder_lives_change_nothing(config, made, tmp_path):
    PromptEncoder(config).encode(["a cat"])
    made.clear()
    (tmp_path / "copy").mkdir()
    for name in ("umt5.safetensors", "tokenizer.json"):
        (tmp_path / "copy" / name).write_bytes((tmp_path / name).read_bytes())
    moved = replace(config, checkpoint_path=str(tmp_path / "copy" / "umt5.safetensors"), residence="cpu")
    PromptEncoder(moved).encode(["a cat"])
    assert not made


def test_weights_exchanged_under_a_running_process_do_not_spoil_what_is_kept(config, tmp_path):
    encoder = PromptEncoder(config)
    encoder.encode(["a cat"])
    save_file(random_encoder(seed=1).state_dict(), tmp_path / "umt5.safetensors")
    want = reference(config, ["a dog"])
    assert torch.equal(encoder.encode(["a dog"]), want)
    assert torch.equal(PromptEncoder(config).encode(["a dog"]), want)


def test_random_weights_of_no_checkpoint_are_not_kept(config):
    PromptEncoder(replace(config, checkpoint_path=None, tokenizer=str(Path(config.checkpoint_path).parent))).encode(
        [""]
    )
    assert kept() == []


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([[1.0, 0], [0, 2], [0, 0], [0, 0]]),
        torch.tensor([[1.0, 0], [0, 0], [0, 2], [0, 0]]),
        torch.tensor([[1.0, 0], [0, -0.0], [0, 0], [0, 0]]),
        torch.tensor([[1.0, 0], [1e-45, 0], [0, 0], [0, 0]]),
        torch.ones(4, 2),
        torch.zeros(4, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_embeddings_are_bit_exact_and_without_their_padding(rows, dtype):
    whole = rows.to(dtype)
    embedding_store.write_embedding("key", Embedding.of(whole))
    got = embedding_store.read_embedding("key")
    assert got.whole().dtype == dtype
    assert torch.equal(got.whole().view(torch.uint8), whole.view(torch.uint8)), "signs of zeros too"
    bits = whole.view(torch.uint8).any(1)
    assert len(got.rows) == max([1, *(i + 1 for i in range(4) if bits[i])])


def test_the_file_of_a_short_prompt_is_small(config):
    PromptEncoder(config).encode(["a cat"])
    (file,) = kept()
    with safe_open(file, "pt") as content:
        assert content.get_tensor("rows").shape == (6, SMALL.dim)
    assert file.stat().st_mode & 0o077 == 0, "prompts are private"


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "another prompt's", "no notes", "folder"])
def test_a_damaged_file_is_ignored_and_written_again(config, made, damage):
    want = PromptEncoder(config).encode(["a cat"])
    (file,) = kept()
    whole = file.read_bytes()
    PromptEncoder(config).encode(["a dog"])
    (other,) = set(kept()) - {file}
    if damage == "a bit":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(whole[:-9])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "another prompt's":
        file.write_bytes(other.read_bytes())
    elif damage == "no notes":
        save_file({"rows": torch.ones(6, SMALL.dim)}, file)
    elif damage == "folder":
        file.unlink()
        file.mkdir()
    made.clear()
    assert torch.equal(PromptEncoder(config).encode(["a cat"]), want)
    assert len(made) == 1
    if damage != "folder":
        assert torch.equal(PromptEncoder(config).encode(["a cat"]), want)
        assert len(made) == 1, "the file is whole again"
    assert [each for each in kept() if each.suffix == ".part"] == []


def test_a_full_disk_costs_only_speed_and_is_said_once(config, monkeypatch, capsys):
    want = reference(config, ["a cat", "a dog"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedding_store.os, "replace", full)
    encoder = PromptEncoder(config)
    assert torch.equal(encoder.encode(["a cat"]), want[:1])
    assert torch.equal(encoder.encode(["a dog"]), want[1:])
    assert capsys.readouterr().err.count("embeddings of prompts cannot be kept") == 1
    assert kept() == [], "nothing half written stays"
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    assert torch.equal(PromptEncoder(config).encode(["a cat"]), want[:1])


def test_the_folder_is_bounded_and_the_oldest_use_goes_first(monkeypatch):
    for name in "abc":
        embedding_store.write_embedding(name, Embedding.of(torch.ones(8, 16)))
    sizes = [file.stat().st_size for file in kept()]
    for name, when in (("a", 300), ("b", 100), ("c", 200)):
        file = cache_folder("embeddings") / f"{name}.safetensors"
        embedding_store.os.utime(file, (when, when))
    assert embedding_store.read_embedding("b") is not None, "which is a use"
    monkeypatch.setattr(embedding_store, "LIMIT", 3 * max(sizes))
    embedding_store.write_embedding("d", Embedding.of(torch.ones(8, 16)))
    assert [file.stem for file in kept()] == ["a", "b", "d"]


def test_many_writers_and_readers_of_one_prompt_do_not_meet():
    whole = torch.arange(4096.0).view(32, 128)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(20):
            embedding_store.write_embedding("key", Embedding.of(whole))
            found = embedding_store.read_embedding("key")
            if found is None or not torch.equal(found.whole(), whole):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [file.name for file in kept()] == ["key.safetensors"]
