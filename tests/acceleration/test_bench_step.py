"""``flashdreams bench step``: the real block, and a bound whose work is that which is counted for it."""

from __future__ import annotations

import json

import pytest
import torch

from flashdreams.acceleration.bench.bound import work
from flashdreams.acceleration.bench.sampling import Plan
from flashdreams.acceleration.bench.step import Step, grid_of, measure_step
from flashdreams.acceleration.counting import counting
from flashdreams.infra.errors import UserError
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.scripts.main import dispatch

pytestmark = pytest.mark.ci_cpu

DIM, HEADS, FFN, TEXT = 48, 2, 96, 4
QUERIES, KEYS = 12, 24
SMALL = ["--dim", "48", "--heads", "2", "--ffn-dim", "96", "--queries", "12", "--keys", "24", "--repeat", "2"]


def config(layers: int = 1, **options) -> WanTransformerConfig:
    network = WanNetworkConfig(
        dim=DIM, ffn_dim=FFN, num_heads=HEADS, num_layers=layers, text_dim=8, text_len=TEXT, freq_dim=16
    )
    return WanTransformerConfig(network=network, dtype="float32", len_t=3, window_size_t=6, **options)


@pytest.fixture
def step() -> Step:
    return Step(config(layers=2), 4, "cpu")


def test_the_bounds_work_is_that_of_the_arithmetic_and_of_the_counter(step: Step):
    linears = 2 * QUERIES * (6 * DIM**2 + 2 * DIM * FFN)
    attended = 4 * DIM * QUERIES * (KEYS + TEXT)
    assert work(step.calls) == 2 * (linears + attended), "two blocks, a full window, the text"
    with counting() as counter:
        step.run()
    assert sum(counter.flops.values()) == work(step.calls)
    assert len(step.calls) == 2 * (8 + 2)


def test_a_step_is_a_pass_through_the_networks_own_blocks(step: Step):
    """What goes into the head in a pass of the transformer is what the caught inputs give again."""
    caught = {}
    real = step.blocks[-1].register_forward_hook(lambda block, args, out: caught.setdefault("out", out))
    first = step.run()
    real.remove()
    assert torch.equal(first, caught["out"]) and torch.equal(step.run(), first)


@pytest.mark.parametrize(("tokens", "grid"), [(1560, (39, 40)), (60, (6, 10)), (7, (1, 7)), (1, (1, 1))])
def test_a_frame_is_as_square_as_its_tokens_allow(tokens: int, grid: tuple[int, int]):
    assert grid_of(tokens) == grid


def test_compiled_and_uncompiled_are_measured_beside_the_same_bound():
    entries, facts = measure_step(
        config(), tokens=4, device="cpu", modes=("eager", "compiled"), plan=Plan(repeat=3, warmup=0)
    )
    eager, compiled = entries
    assert (eager.name, compiled.name) == ("eager", "compiled") and eager.bound == compiled.bound
    assert len(eager.seconds) == len(compiled.seconds) == 3 and compiled.note == ""
    assert facts["compiled against eager, largest difference"] < 1e-5


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "results" / "step.json"
    assert dispatch(["bench", "step", *SMALL, "--eager", "--json", "--output", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    (entry,) = printed["entries"]
    assert entry["name"] == "eager" and entry["rounds"] == 2 and entry["over_bound"] > 0
    assert printed["settings"]["queries"] == 12 and printed["machine"]["torch"] == torch.__version__
    assert dispatch(["bench", "step", *SMALL, "--eager", "--compare", str(path)]) == 0
    assert f"time over that in {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--queries", "10"], "--queries 10 is no whole number of tokens in each of 3 latent frames"),
        (["step", "--queries", "12", "--keys", "8"], "--keys 8 must be at least --queries, and a multiple of the 4"),
        (["step", "--compare", "nowhere.json"], "nowhere.json cannot be read as JSON"),
        (["step", "--repeat", "0"], "repeat=0"),
        (["steps"], "there is no benchmark 'steps'; there are rollout, step"),
    ],
)
def test_mistakes_are_said(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        dispatch(["bench", *words])


def test_every_attention_backend_is_measured(capsys):
    sizes = ["--queries", "8", "--keys", "16", "--heads", "2", "--head-dim", "8"]
    assert dispatch(["bench", "attention", *sizes, "--repeat", "1", "--json"]) == 0
    names = {entry["name"] for entry in json.loads(capsys.readouterr().out)["entries"]}
    assert {"sdpa", "reference"} <= names


def test_decoding_is_measured_beside_its_convolutions(capsys):
    sizes = ["--vae-dim", "4", "--latent-h", "2", "--latent-w", "2"]
    assert dispatch(["bench", "vae", *sizes, "--eager", "--repeat", "1", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert entry["flops"] > 0 and entry["over_bound"] > 0
    assert dispatch(["bench", "vae", *sizes, "--eager", "--repeat", "1", "--json", "--channels-last"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in report["entries"]] == ["eager", "eager, channels last"]
    assert report["facts"]["eager, channels last against eager, largest difference"] < 1e-5
