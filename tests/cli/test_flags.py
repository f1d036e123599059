"""Flags: each sets one field of the config tree, by the field's own rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.config import InstantiateConfig, derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.recipes.template.config import RUNNER_TEMPLATE
from flashdreams.scripts.command_line import MAX_SEED, apply_flags, parse_seed
from flashdreams.scripts.flags import flags_of

pytestmark = pytest.mark.ci_cpu

TRANSFORMER = "pipeline.diffusion_model.transformer"
DEEP = "--pipeline.diffusion-model.transformer"


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--prompt", "a red ball"], "prompt", "a red ball"),
        (["--prompt="], "prompt", ""),
        (["--prompt=--seed"], "prompt", "--seed"),
        (["--prompt", "null"], "prompt", "null"),
        (["--negative-prompt", ""], "negative_prompt", ""),
        (["--negative_prompt", "12"], "negative_prompt", "12"),
        (["--image", "a/b.png"], "image", Path("a/b.png")),
        (["--duration", "2"], "duration", 2.0),
        (["--guidance-scale", "1e-3"], "guidance_scale", 1e-3),
        (["--seed", "18446744073709551615"], "seed", MAX_SEED),
        (["--seed=9007199254740993"], "seed", 9007199254740993),
        (["--preview"], "preview", True),
        (["--preview", "--no-preview"], "preview", False),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--num-steps", "1", "--num-steps", "2"], "num_steps", 2),
        ([f"{DEEP}.len-t", "4"], f"{TRANSFORMER}.len_t", 4),
        ([f"{DEEP}.len_t=4"], f"{TRANSFORMER}.len_t", 4),
        ([f"{DEEP}.window-size-t", "None"], f"{TRANSFORMER}.window_size_t", None),
        ([f"{DEEP}.network.patch-size", "1", "4", "4"], f"{TRANSFORMER}.network.patch_size", (1, 4, 4)),
        ([f"{DEEP}.allow-missing"], f"{TRANSFORMER}.allow_missing", ()),
        (["--lora", "a:0.5", "--seed", "3", "--lora=b", "c"], ("lora", "seed"), (("a:0.5", "b", "c"), 3)),
        ([f"{DEEP}.allow-missing", "a.b", "c"], f"{TRANSFORMER}.allow_missing", ("a.b", "c")),
    ],
)
def test_a_flag_sets_its_field_and_nothing_else(words, path, value):
    changes = {path: value} if isinstance(path, str) else dict(zip(path, value, strict=True))
    assert apply_flags(RUNNER_TEMPLATE, words) == derive_config(RUNNER_TEMPLATE, changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "red", "ball"], "--prompt takes one value, not 3; put quotes"),
        (["--prompt", "-x y"], "--prompt needs a value"),
        (["--prompt"], "--prompt needs a value"),
        (["--seed"], "--seed is ''"),
        (["--num-frames", "1.5"], "--num-frames is '1.5'; expected a whole number or None"),
        (["--num-frames", "0x10"], "--num-frames is '0x10'"),
        (["--num-frames", "1_000"], "--num-frames is '1_000'"),
        (["--num-frames", ""], "--num-frames is ''"),
        (["--duration", ""], "--duration is ''; expected a number or None"),
        (["--guidance-scale", "nan"], "--guidance-scale is 'nan'; expected a finite number"),
        (["--guidance-scale", "-inf"], "--guidance-scale is '-inf'; expected a finite number"),
        (["--guidance-scale", "1e999"], "--guidance-scale is '1e999'; expected a finite number"),
        (["--dtype", "float31"], "--dtype is 'float31'; expected one of 'float32', "),
        (["--dtype", "Float32"], "--dtype is 'Float32'"),
        ([f"{DEEP}.network.patch-size", "1", "2"], "expected a list of 3"),
        (["--preview=yes"], "'yes' belongs to no flag"),
        (["word"], "'word' belongs to no flag"),
        (["--promt", "x"], "there is no flag --promt; did you mean '--prompt'"),
        (["--sed=5"], "there is no flag --sed; did you mean '--seed'"),
        (["--len-t", "3"], rf"did you mean '{DEEP}\.len-t'"),
        (["--pipeline.nme", "x"], "there is no flag --pipeline.nme"),
        (["--runner-name", "x"], "there is no flag --runner-name"),
        (["--pipeline.name", "x"], "there is no flag --pipeline.name"),
        (["--confg", "x"], "did you mean '--config'"),
        (["--pipeline", "x"], "there is no flag --pipeline;"),
        (["-p", "x"], "there is no flag -p"),
    ],
)
def test_a_mistake_is_told_with_the_value_and_the_fix(words, message):
    with pytest.raises(UserError, match=message) as caught:
        apply_flags(RUNNER_TEMPLATE, words, known=["--config"])
    assert "\n" not in str(caught.value)


B10 = {
    "0": 0, "4294967296": 2**32, "9007199254740993": 2**53 + 1, "9223372036854775807": 2**63 - 1,
    "9223372036854775808": 2**63, "17982163893102248868": 17982163893102248868, "007": 7,
    "-1": None, "-9223372036854775808": None, "18446744073709551616": None, "1e3": None, "0x10": None, " 7": None,
    "": None, "None": None, "1.0": None, "+1": None, "1_0": None, "٣": None, "²": None, "nan": None, "9" * 5000: None,
}  # fmt: skip


@pytest.mark.parametrize(("text", "seed"), B10.items(), ids=lambda value: str(value)[:24])
def test_b10_a_seed_is_decimal_digits_in_range(text, seed):
    if seed is None:
        with pytest.raises(UserError, match=str(MAX_SEED)):
            apply_flags(RUNNER_TEMPLATE, [f"--seed={text}"])
    else:
        assert apply_flags(RUNNER_TEMPLATE, ["--seed", text]).seed == seed


@given(st.integers(min_value=0, max_value=MAX_SEED), st.integers(min_value=0, max_value=3))
def test_every_seed_in_range_is_read_exactly(seed, zeros):
    assert parse_seed("0" * zeros + str(seed)) == seed


@given(st.integers(min_value=MAX_SEED + 1) | st.integers(max_value=-1))
def test_no_seed_out_of_range_is_read(seed):
    with pytest.raises(UserError):
        parse_seed(str(seed))


@dataclass(frozen=True, kw_only=True)
class Part(InstantiateConfig):
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Extended(RunnerConfig):
    """A runner with fields of its own, after the pipeline and of the rarer kinds."""

    parts: tuple[Part, ...] = (Part(), Part(size=2))
    absent: Part | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    limit: float = float("inf")
    choice: int | bool | None = None


EXTENDED = Extended(runner_name="x", description="", pipeline=RUNNER_TEMPLATE.pipeline)


def test_every_field_that_words_can_give_has_a_flag():
    paths = [flag.path for flag in flags_of(EXTENDED).all_flags()]
    assert paths.index("limit") < paths.index("pipeline.height")
    assert {"parts.0.size", "parts.1.size", "limit", "choice"} <= set(paths)
    assert not {"absent", "pairs", "parts", "pipeline.name", "runner_name"} & set(paths)


def test_the_rarer_kinds_are_set_too():
    derived = apply_flags(EXTENDED, ["--parts.1.size", "5", "--limit", "inf", "--choice", "true"])
    assert derived == derive_config(EXTENDED, {"parts.1.size": 5, "choice": True})
