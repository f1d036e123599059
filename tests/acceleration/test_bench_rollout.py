"""``flashdreams bench rollout``: the plain pipeline's numbers, from weights and inputs in files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdreams.acceleration.bench.inputs import Sizes, random_inputs, read_inputs, write_inputs
from flashdreams.acceleration.bench.rollout import Race
from flashdreams.acceleration.counting import counting
from flashdreams.core.noise import KeyedNoise
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from flashdreams.scripts.main import dispatch

pytestmark = pytest.mark.ci_cpu

SIZES = Sizes((1, 16, 2, 4, 4), chunks=3, steps=2, text_dim=8)
FLAGS = [
    *("--dim", "48", "--heads", "2", "--layers", "2", "--ffn-dim", "96", "--text-dim", "8", "--freq-dim", "16"),
    *("--vae-dim", "4", "--latent-h", "4", "--latent-w", "4", "--frames-per-chunk", "2", "--window", "4"),
    *("--sink", "1", "--steps", "2", "--chunks", "3", "--shift", "3", "--eager", "--repeat", "2", "--warmup", "0"),
]


def plain_pipeline():
    """The same model, built as any other."""
    network = WanNetworkConfig(dim=48, num_heads=2, num_layers=2, ffn_dim=96, text_dim=8, freq_dim=16)
    transformer = WanTransformerConfig(network=network, dtype="float32", len_t=2, window_size_t=4, sink_size_t=1)
    scheduler = FewStepSchedulerConfig(num_steps=2, denoising_steps=(1000, 500), shift=3.0)
    model = DiffusionModelConfig(transformer=transformer, scheduler=scheduler)
    return PipelineConfig(name="plain", diffusion_model=model, decoder=WanVAEConfig(dim=4), height=32, width=32).setup()


@pytest.fixture(scope="module")
def pipeline():
    return plain_pipeline()


@pytest.fixture(scope="module")
def files(pipeline, tmp_path_factory):
    """Weights in native keys, and inputs; what the plain pipeline makes of them."""
    folder = tmp_path_factory.mktemp("bench")
    parts = {"dit": pipeline.diffusion_model.transformer.network, "vae": pipeline.decoder}
    weights = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    inputs = random_inputs(SIZES, seed=5)
    write_inputs(inputs, folder / "inputs.safetensors")
    rollout = pipeline.rollout(conditions={"text": inputs.text}, noise=KeyedNoise(5), num_chunk=3)
    return folder, torch.cat([chunk.latent for chunk in rollout], 2)


def given(files) -> list[str]:
    return ["--weights", str(files[0] / "weights.safetensors"), "--inputs", str(files[0] / "inputs.safetensors")]


def test_the_dump_is_what_the_plain_pipeline_makes_bit_for_bit(files, tmp_path, capsys):
    """The inputs' file holds the noise of its seed, so that the reference draws its own."""
    dump = tmp_path / "made.safetensors"
    assert dispatch(["bench", "rollout", *FLAGS, *given(files), "--dump", str(dump), "--json"]) == 0
    made = load_file(dump)
    assert torch.equal(made["latents"], files[1])
    assert made["frames"].shape == (1, 3, 21, 32, 32) and made["frames"].abs().max() <= 1
    facts = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in facts["entries"]] == ["eager dit", "eager decode"]
    assert facts["facts"] == {"eager against the uncompiled path, largest difference of latents": 0.0}


def test_without_files_the_same_seed_gives_the_same_numbers(tmp_path, capsys):
    dumps = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    inputs = tmp_path / "inputs.safetensors"
    words = ["bench", "rollout", *FLAGS, "--no-decode", "--repeat", "1"]
    dispatch([*words, "--seed", "3", "--save-inputs", str(inputs), "--dump", str(dumps[0])])
    dispatch([*words, "--seed", "3", "--inputs", str(inputs), "--dump", str(dumps[1])])
    first, second = (load_file(dump) for dump in dumps)
    assert first.keys() == {"latents"} and torch.equal(first["latents"], second["latents"])
    assert "over the bound by chunk" in capsys.readouterr().out


def test_the_bound_has_the_work_of_every_pass_as_the_window_fills(pipeline):
    """Three chunks of two steps and a commit each, whose last block only keeps keys and values."""
    race = Race(plain_pipeline(), random_inputs(SIZES, 0), 3, lambda: 0.0)
    race.record()
    with counting(pipeline) as counter:
        cache = pipeline.initialize_cache(conditions={"text": torch.zeros(1, 512, 8)}, noise=KeyedNoise(0))
        counter.reset()
        for chunk in range(3):
            pipeline.diffusion_model.generate(chunk, cache)
            pipeline.finalize(chunk, cache)
    assert sum(counter.flops.values()) == race.flops["dit"]


def test_times_do_not_hold_the_bounds(monkeypatch):
    """With a clock that only the bounds move, a rollout takes no time."""
    now = [0.0]
    race = Race(plain_pipeline(), random_inputs(SIZES, 0), 3, lambda: now[0])
    race.record()

    def slow(bound):
        return lambda: (bound(), now.__setitem__(0, now[0] + 1))

    race._bounds = [slow(bound) for bound in race._bounds]
    made = race.run()
    assert made.seconds == {"dit": [0.0, 0.0, 0.0], "decode": [0.0, 0.0, 0.0]}
    assert made.bound == {"dit": [3.0, 3.0, 3.0], "decode": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("text", None, "lacks text; 3 chunks of 2 steps need 5 tensors"),
        ("noise.2.0", None, r"lacks noise\.2\.0"),
        ("image", (1,), "holds image; expected text, noise and noise"),
        ("text", (1, 4, 9), r"text in .* is \[1, 4, 9\]; expected \[1, up to 512, 8\]"),
        ("noise", (1, 16, 5, 4, 4), r"expected \[1, 16, 6, 4, 4\], or more frames"),
        ("noise.1.0", (1, 16, 1, 4, 4), r"noise\.1\.0 in .* is \[1, 16, 1, 4, 4\]; expected \[1, 16, 2, 4, 4\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path, name: str, shape: tuple[int, ...] | None, message: str):
    path = tmp_path / "inputs.safetensors"
    tensors = random_inputs(SIZES, 0).tensors()
    tensors.pop(name, None)
    save_file(tensors if shape is None else tensors | {name: torch.zeros(shape)}, path)
    with pytest.raises(ValueError, match=message):
        read_inputs(path, SIZES)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    path = tmp_path / "inputs.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        dispatch(["bench", "rollout", *FLAGS, "--inputs", str(path)])


def test_inputs_may_hold_more_than_is_made(tmp_path):
    path = tmp_path / "inputs.safetensors"
    write_inputs(random_inputs(Sizes(SIZES.chunk, 5, 4, 8), 1), path)
    inputs = read_inputs(path, SIZES)
    assert torch.equal(inputs.noise.initial(2, 4, SIZES.chunk), KeyedNoise(1).initial(2, 4, SIZES.chunk))


def test_odd_latents_are_refused():
    with pytest.raises(UserError, match="the latent is 5x4; this network takes even numbers"):
        dispatch(["bench", "rollout", *FLAGS, "--latent-h", "5"])
