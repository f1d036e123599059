"""The text encoder: umT5 against its definition, and the way from a prompt to embeddings. (transformers' numbers:
``tests/parity``.)"""

from __future__ import annotations

import gzip
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.core import notices
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.recipes.wan import tokenizer
from flashdreams.recipes.wan.text_encoder import UMT5TextEncoder
from flashdreams.recipes.wan.tokenizer import clean_prompt, find_tokenizer, load_tokenizer
from flashdreams.recipes.wan.umt5 import UMT5Encoder, relative_buckets
from flashdreams.recipes.wan.umt5_config import UMT5Config
from small_umt5 import SMALL, Letters, random_encoder

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()


@pytest.fixture(scope="module")
def encoder() -> UMT5Encoder:
    return random_encoder()


@pytest.fixture
def text_encoder(encoder: UMT5Encoder) -> UMT5TextEncoder:
    text_encoder = UMT5TextEncoder(SMALL)
    text_encoder.encoder, text_encoder.tokenizer = encoder, Letters()
    return text_encoder


def ids(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(2, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_keys_and_shapes_are_those_of_the_published_checkpoint():
    with torch.device("meta"):
        encoder = UMT5Encoder(UMT5Config())
    shapes = {key: list(weight.shape) for key, weight in encoder.state_dict().items()}
    published = json.loads(gzip.decompress((DATA / "umt5-xxl-encoder.native.json.gz").read_bytes()))
    assert shapes == {key: entry["shape"] for key, entry in published["tensors"].items()}


def test_distances_fall_into_the_published_buckets():
    def bucket(relative: int) -> int:
        distance = abs(relative)
        if distance >= 8:
            distance = min(15, 8 + math.floor(8 * math.log(distance / 8) / math.log(16)))
        return distance + 16 * (relative > 0)

    table = relative_buckets(200, num_buckets=32, max_distance=128)
    assert table.tolist() == [[bucket(key - query) for key in range(200)] for query in range(200)]
    assert [bucket(-d) for d in (7, 8, 15, 16, 31, 32, 64, 127, 128)] == [7, 8, 9, 10, 11, 12, 14, 15, 15]


def test_padding_changes_nothing_whatever_its_ids(encoder: UMT5Encoder):
    short = ids(1, 6)
    want = encoder(short)
    padded = torch.cat((short, ids(1, 9, seed=4)), dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 9])
    torch.testing.assert_close(encoder(padded, mask)[:, :6], want, rtol=1e-5, atol=1e-5)
    assert (encoder(padded)[:, :6] - want).abs().max() > 0.01, "without the mask it would"


def test_prompts_are_padded_masked_and_zeroed_as_published(text_encoder: UMT5TextEncoder):
    """The published way: fill up to text_len, mask, and zero what lies beyond each prompt."""
    prompts = ["a cat", "", "two dogs run"]
    rows = [Letters().encode(prompt).ids for prompt in prompts]
    filled = torch.tensor([row + [0] * (SMALL.text_len - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (SMALL.text_len - len(row)) for row in rows])
    want = text_encoder.encoder(filled, mask) * mask[..., None]
    got = text_encoder.encode(prompts)
    assert got.shape == (3, SMALL.text_len, SMALL.dim)
    assert [row.abs().sum(1).count_nonzero().item() for row in got] == [6, 1, 13]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_prompt_does_not_depend_on_its_neighbours(text_encoder: UMT5TextEncoder):
    together = text_encoder.encode(["a cat", "two dogs run"])
    alone = torch.cat([text_encoder.encode(["a cat"]), text_encoder.encode(["two dogs run"])])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_a_prompt_that_is_too_long_keeps_its_end_mark_and_says_so(text_encoder: UMT5TextEncoder, capsys):
    got = text_encoder.tokenize("abcdefghijklmnopqrstuvwxyz")
    assert got == Letters().encode("abcdefghijklmnopqrs").ids and len(got) == SMALL.text_len
    assert "27 tokens; the text encoder takes 20" in capsys.readouterr().err
    assert text_encoder.tokenize("abcdefghijklmnopqrs") == got
    assert capsys.readouterr().err == ""


def test_half_precision_weights_give_nearly_the_same(encoder: UMT5Encoder):
    half = UMT5Encoder(SMALL).requires_grad_(False)
    half.load_state_dict(encoder.state_dict())
    want, got = encoder(ids(1, 12)), half.to(torch.bfloat16)(ids(1, 12))
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() < 0.1 * want.abs().max()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  a\tcat \n\n on a mat ", "a cat on a mat"),
        ("cats &amp;amp; dogs", "cats & dogs"),
        ("a &lt;b&gt; &quot;c&quot;", 'a <b> "c"'),
        ("", ""),
    ],
)
def test_prompts_are_cleaned_as_published(text: str, clean: str, capsys):
    assert clean_prompt(text) == clean
    assert capsys.readouterr().err == ""


def test_ftfy_repairs_characters_where_it_is_installed():
    pytest.importorskip("ftfy")
    assert clean_prompt("\u201cschÃ¶n\u201d") == '"schön"'


def test_without_ftfy_only_text_that_it_might_repair_brings_a_notice(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert clean_prompt("a plain cat &amp; dog") == "a plain cat & dog"
    assert capsys.readouterr().err == ""
    assert clean_prompt("“schön”") == "“schön”"
    assert clean_prompt("“schöner”") == "“schöner”"
    assert capsys.readouterr().err.count("ftfy is not installed") == 1


def test_without_the_tokenizers_package_the_message_names_what_to_install(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        CheckpointError, match=r"'tokenizers', which is not installed; pip install 'flashdreams\[text\]'"
    ):
        load_tokenizer(str(tmp_path), 40)


def test_random_weights_have_no_tokenizer():
    with pytest.raises(ValueError, match=r"no tokenizer; set its tokenizer .*\(--prompt-embeds FILE\)"):
        UMT5TextEncoder(replace(SMALL, checkpoint_path="random:0")).encode(["a cat"])
    with pytest.raises(CheckpointError, match="random:0 has no tokenizer; .*--prompt-embeds"):
        find_tokenizer("random:0")


@pytest.mark.parametrize(
    ("weights", "place"),
    [
        ("models_t5_umt5-xxl-enc-bf16.safetensors", "google/umt5-xxl/tokenizer.json"),
        ("text_encoder/model.safetensors", "tokenizer/tokenizer.json"),
        ("umt5.safetensors", "tokenizer.json"),
    ],
)
def test_the_tokenizer_is_found_beside_the_weights(tmp_path: Path, weights: str, place: str):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / weights).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / weights).touch()
    with pytest.raises(CheckpointError, match="no tokenizer.json for the text encoder at .*looked for"):
        find_tokenizer(str(tmp_path / weights))
    file.touch()
    assert find_tokenizer(str(tmp_path / weights)) == file
    assert find_tokenizer(str((tmp_path / weights).parent)) == file, "or beside the folder"
    assert find_tokenizer(str(file)) == file


def test_the_tokenizer_is_fetched_from_the_repository_of_the_weights(tmp_path: Path, monkeypatch):
    listing = SimpleNamespace(files=["text_encoder/model.safetensors", "tokenizer/tokenizer.json"])
    monkeypatch.setattr(tokenizer, "list_files", lambda repo, revision: listing)
    monkeypatch.setattr(tokenizer, "download", lambda listing, names: [tmp_path / name for name in names])
    assert find_tokenizer("hf://org/repo/text_encoder") == tmp_path / "tokenizer/tokenizer.json"
    assert find_tokenizer("org/repo") == tmp_path / "tokenizer/tokenizer.json"
    (tmp_path / "google/umt5-xxl").mkdir(parents=True)
    (tmp_path / "google/umt5-xxl/tokenizer.json").touch()
    monkeypatch.setattr(tokenizer, "list_files", lambda repo, revision: tmp_path)
    assert find_tokenizer("org/repo") == tmp_path / "google/umt5-xxl/tokenizer.json", "offline, from the cached copy"


def write_tokenizer(path: Path, words: list[str]) -> None:
    """A ``tokenizer.json`` in the manner of T5's, one token per word, that pads and cuts off by itself."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    made.enable_padding(length=30)
    made.enable_truncation(2)
    made.save(str(path))


def test_from_a_checkpoint_with_its_tokenizer_to_embeddings(tmp_path: Path, encoder: UMT5Encoder):
    write_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "</s>", "<unk>", "a", "cat", "&", "dog"])
    save_file(encoder.state_dict(), tmp_path / "umt5.safetensors")
    text_encoder = replace(SMALL, checkpoint_path=str(tmp_path / "umt5.safetensors")).setup()
    assert text_encoder.tokenize(" a cat\n&amp; a horse ") == [3, 4, 5, 3, 2, 1]
    got = text_encoder.encode(["a cat", ""])
    torch.testing.assert_close(got[0, :3], encoder(torch.tensor([[3, 4, 1]]))[0], rtol=1e-5, atol=1e-5)
    assert got[0, 3:].eq(0).all() and got[1, 0].ne(0).any() and got[1, 1:].eq(0).all()


def test_the_tokenizer_of_another_model_is_refused_before_weights_are_read(tmp_path: Path):
    write_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "</s>", "<pad>"])
    config = replace(SMALL, checkpoint_path=str(tmp_path / "absent.safetensors"))
    with pytest.raises(CheckpointError, match="another model: its <pad> and </s> are 2 and 1, of 3"):
        config.setup()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        config.setup()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim_attn": 30}, "dim_attn=30 must be a multiple of num_heads=4"),
        ({"num_buckets": 6}, "num_buckets=6"),
        ({"max_distance": 8}, "max_distance=8"),
        ({"text_len": 0}, "text_len is 0"),
        ({"dtype": "float16"}, "overflows; use 'bfloat16'"),
    ],
)
def test_a_config_out_of_range_says_so(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change).validate_tree()
