"""Streaming into a meta-built module: all or nothing, and nothing that a constructor made is lost."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flashdreams.core.checkpoint import CheckpointError, load_checkpoint, match_checkpoint, open_checkpoint, room
from flashdreams.core.checkpoint import load as loading
from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.core.checkpoint.meta import lost_tensors, parameters_on_meta
from flashdreams.infra.config import ModuleConfig
from small_model import SmallModel, meta_model, same, save_shards, untouched, weights

pytestmark = pytest.mark.ci_cpu


def renamed(state, prefix="net."):
    return {prefix + key: value for key, value in state.items()}


def strip(state):
    return {key.removeprefix("net."): value for key, value in state.items()}


@pytest.fixture
def path(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_buffers_and_plain_tensors_survive_meta_construction(path):
    module = meta_model()
    assert all(parameter.is_meta for parameter in module.parameters())
    load_checkpoint(module, str(path))
    assert same(module, weights())
    assert torch.equal(module.table, torch.arange(5.0)) and module.mask[0].all()
    assert not lost_tensors(module)


def test_a_tensor_derived_from_weights_in_the_constructor_is_named_as_lost():
    class Derived(SmallModel):
        def __init__(self):
            super().__init__()
            self.scales = {"a": self.a.weight.detach().view(-1)}

    with parameters_on_meta():
        module = Derived()
    assert "scales['a']" in lost_tensors(module)


def test_tied_parameters_stay_tied_and_other_threads_build_as_usual():
    built = []
    with parameters_on_meta():
        tied = nn.Linear(2, 2)
        second = nn.Linear(2, 2)
        second.weight = tied.weight
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert second.weight is tied.weight
    assert not built[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_what_is_on_meta_is_not_filled_and_everything_else_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(3, 2, padding_idx=0)
            nn.init.trunc_normal_(self.embedding.weight, std=0.02)
            nn.init.constant_(tensor=self.embedding.weight, val=1.0)
            self.embedding.weight.data.mul_(2).clamp_(-1, 1)
            self.register_buffer("table", nn.init.ones_(torch.empty(2)).mul_(3).add_(1))

    with parameters_on_meta():
        model = Model()
    assert model.embedding.weight.is_meta and list(model.embedding.weight.shape) == [3, 2]
    assert model.get_buffer("table").tolist() == [4.0, 4.0]
    outside = Model()
    assert outside.embedding.weight.abs().max() == 1


def test_unchanged_tensors_are_the_pages_of_the_file_and_the_file_stays_as_it_is(path):
    before = path.read_bytes()
    module = meta_model()
    load_checkpoint(module, str(path))
    with torch.no_grad():
        module.a.weight.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_touches_floats_only(path, dtype):
    module = meta_model()
    load_checkpoint(module, str(path), dtype=dtype)
    assert module.count.tolist() == [3, 4]
    assert torch.equal(module.a.weight, weights()["a.weight"].to(dtype))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_no_crash(tmp_path, mapped):
    save_file({"big": torch.ones(100_000), "end": torch.ones(100_000)}, tmp_path / "w.safetensors")
    checkpoint = open_checkpoint(tmp_path / "w.safetensors")
    if mapped:
        checkpoint.lazily("end")
    os.truncate(tmp_path / "w.safetensors", 8192)
    with pytest.raises(CheckpointError, match="cut off"):
        checkpoint.read("end")


def test_shards_equal_the_single_file(tmp_path):
    save_shards(tmp_path, weights(), 3)
    module = meta_model()
    report = load_checkpoint(module, str(tmp_path))
    assert same(module, weights())
    assert len(report.digests) == 3 and report.digest not in report.digests.values()


def computed(state):
    """Fuses, splits and changes values, as transforms do."""
    state = strip(state)
    fused = state.pop("ab")
    return {**state, "a.bias": fused[:4], "b.bias": fused[4:], "a.weight": state["a.weight"].T}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_that_computes_new_tensors(tmp_path, dtype):
    state = weights()
    stored = {key: value for key, value in state.items() if not key.endswith("bias")}
    stored |= {"ab": torch.cat([state["a.bias"], state["b.bias"]]), "a.weight": state["a.weight"].T.contiguous()}
    save_file(renamed(stored), tmp_path / "w.safetensors")
    module = meta_model()
    load_checkpoint(module, str(tmp_path / "w.safetensors"), transform=computed, dtype=dtype)
    assert same(module, {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()})
    assert module.a.weight.is_contiguous()


def test_a_function_that_writes_into_its_tensors(path):
    def filled(state):
        state["a.weight"].fill_(2)
        return state

    before = path.read_bytes()
    module = meta_model()
    load_checkpoint(module, str(path), transform=filled)
    assert (module.a.weight == 2).all() and path.read_bytes() == before


def test_a_key_map_is_streamed_tensor_by_tensor(tmp_path, monkeypatch):
    save_file(renamed(weights()), tmp_path / "w.safetensors")
    alive = []
    read = loading.Checkpoint.read

    def counted(checkpoint, key):
        alive.append(key)
        return read(checkpoint, key)

    monkeypatch.setattr(loading.Checkpoint, "read", counted)
    module = meta_model()
    load_checkpoint(module, str(tmp_path / "w.safetensors"), transform=KeyMap(((r"^net\.", ""),)))
    assert same(module, weights())
    assert sorted(alive) == sorted(renamed(weights()))


def test_nothing_is_read_before_the_bijection_is_decided(tmp_path, monkeypatch):
    save_file(weights() | {"surplus": torch.zeros(1)}, tmp_path / "w.safetensors")
    monkeypatch.setattr(loading.Checkpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    module = meta_model()
    with pytest.raises(CheckpointError, match=r"matched 5/5, 1 unexpected\n  unexpected surplus \[1\]"):
        load_checkpoint(module, str(tmp_path / "w.safetensors"))
    assert untouched(module)


def test_a_transform_that_fails_is_named(path):
    def broken(state):
        return {"x": state["absent"]}

    with pytest.raises(CheckpointError, match="broken cannot map this checkpoint: KeyError: 'absent'"):
        load_checkpoint(meta_model(), str(path), transform=broken)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_stop_the_load_and_leave_the_module(tmp_path, bad, dtype):
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights().items()}
    state["b.weight"][1, 2] = bad
    save_file(state, tmp_path / "w.safetensors")
    module = meta_model()
    with pytest.raises(CheckpointError, match=r"b\.weight has 1 of 8 values that are NaN or infinite"):
        load_checkpoint(module, str(tmp_path / "w.safetensors"), dtype=dtype)
    assert untouched(module)


def test_large_float16_weights_whose_sum_overflows_are_fine(tmp_path):
    state = weights() | {"a.weight": torch.full((4, 3), 60000.0)}
    save_file(state, tmp_path / "w.safetensors")
    load_checkpoint(meta_model(), str(tmp_path / "w.safetensors"), dtype=torch.float16)


def test_values_that_a_cast_makes_infinite_name_the_cast(tmp_path):
    save_file(weights() | {"a.weight": torch.full((4, 3), 1e6)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="float16 cannot hold what is stored; use bfloat16"):
        load_checkpoint(meta_model(), str(tmp_path / "w.safetensors"), dtype=torch.float16)


@pytest.mark.parametrize(
    "stored", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
)
def test_quantized_tensors_that_nobody_asked_for_are_refused(tmp_path, stored):
    save_file(weights() | {"a.weight": torch.ones(4, 3).to(stored)}, tmp_path / "w.safetensors")
    module = meta_model()
    with pytest.raises(CheckpointError, match=r"need the scales.*\n  a\.weight is stored as " + str(stored)[6:]):
        load_checkpoint(module, str(tmp_path / "w.safetensors"))
    assert untouched(module)


def test_fp8_is_read_where_it_was_asked_for(tmp_path):
    eighth = torch.float8_e4m3fn
    save_file(
        {k: v.to(eighth) if v.is_floating_point() else v for k, v in weights().items()}, tmp_path / "w.safetensors"
    )
    module = meta_model()
    load_checkpoint(module, str(tmp_path / "w.safetensors"), dtype=eighth)
    assert module.a.weight.dtype == eighth


def test_integers_where_floats_are_wanted_and_the_reverse(tmp_path):
    save_file(weights() | {"count": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"count is stored as float32"):
        load_checkpoint(meta_model(), str(tmp_path / "w.safetensors"))


def test_permission_to_lack_keys_is_exact_and_echoed(tmp_path, capsys):
    with parameters_on_meta():
        module = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    state = {key: torch.ones(value.shape) for key, value in module.state_dict().items() if not key.endswith("bias")}
    save_file(state, tmp_path / "w.safetensors")
    report = load_checkpoint(module, str(tmp_path / "w.safetensors"), allow_missing=["*.bias"])
    assert report.missing == ("0.bias", "1.bias", "2.bias") and not module[1].bias.any()
    assert "lacks 3 keys, as the model's config allows: 0.bias, 1.bias, 2.bias" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="allow_missing names 'bias', which is no key of the model"):
        load_checkpoint(module, str(tmp_path / "w.safetensors"), allow_missing=["bias"])
    match = match_checkpoint(module, tmp_path / "w.safetensors", allow_missing=["0.*"])
    assert list(match.missing) == ["0.bias", "1.bias", "2.bias"]  # a star is a layer's number, never a name


def test_every_missing_key_is_listed_with_its_three_nearest(tmp_path):
    state = {key.replace("weight", "w"): value for key, value in weights().items()}
    save_file(state | {"zz": torch.zeros(9), "a.w2": torch.zeros(9)}, tmp_path / "w.safetensors")
    match = match_checkpoint(meta_model(), tmp_path / "w.safetensors")
    assert match.summary == "matched 3/5, 2 missing, 4 unexpected"
    assert match.lines(None)[:2] == [
        "missing a.weight [4, 3]; nearest: a.w, a.w2",
        "missing b.weight [2, 4]; nearest: b.w",
    ]


def test_random_weights_depend_on_seed_and_key_alone():
    first, second, other = meta_model(), meta_model(), meta_model()
    report = load_checkpoint(first, "random:5")
    load_checkpoint(second, "random:5")
    load_checkpoint(other, "random:6")
    assert report.digest == "random:5"
    assert same(first, second.state_dict()) and not same(first, other.state_dict())
    with parameters_on_meta():
        reordered = nn.ModuleDict({"b": nn.Linear(4, 2), "a": nn.Linear(3, 4)})
    load_checkpoint(reordered, "random:5")
    assert torch.equal(reordered["a"].weight, first.a.weight)
    half = meta_model()
    load_checkpoint(half, "random:5", dtype=torch.bfloat16)
    assert torch.equal(half.a.weight, first.a.weight.bfloat16())


def test_random_matrices_of_any_size_keep_variance(monkeypatch):
    from flashdreams.core.checkpoint import synthetic

    monkeypatch.setattr(synthetic, "_BLOCK", 997)
    value = synthetic.random_tensor("w", torch.Size([100, 64]), torch.float32, 1)
    assert 0.9 < float(value.std() * 8) < 1.1
    assert len({tuple(row.tolist()) for row in value}) == 100


def test_what_cannot_fit_is_refused_and_the_next_load_works(path, monkeypatch):
    module = meta_model()
    monkeypatch.setattr(room, "_free", lambda device: 10)
    with pytest.raises(CheckpointError, match="GiB on cpu, which has 0.0 GiB free"):
        load_checkpoint(module, str(path), dtype=torch.bfloat16)
    assert untouched(module)
    load_checkpoint(module, str(path))  # mapped in place: needs no room


def test_memory_that_runs_out_halfway_leaves_nothing_behind(path, monkeypatch):
    module, check = meta_model(), loading.check_finite

    def exhausted(value, key, *rest):
        if key == "b.bias":
            raise torch.OutOfMemoryError("out of memory")
        return check(value, key, *rest)

    monkeypatch.setattr(loading, "check_finite", exhausted)
    with pytest.raises(torch.OutOfMemoryError) as error:
        load_checkpoint(module, str(path), dtype=torch.bfloat16)
    frames = [entry.frame.f_locals for entry in error.traceback if entry.name == "load_checkpoint"]
    assert frames and not frames[0]["ready"]
    assert untouched(module)
    monkeypatch.setattr(loading, "check_finite", check)
    load_checkpoint(module, str(path))
    assert same(module, weights())


@dataclass(frozen=True, kw_only=True)
class Configured(ModuleConfig):
    _target: ClassVar[str] = "small_model:ConfiguredModel"


@dataclass(frozen=True, kw_only=True)
class Forgetful(ModuleConfig):
    _target: ClassVar[str] = "small_model:ForgetfulModel"


def test_a_configured_module_is_whole_with_a_checkpoint_as_without(path):
    loaded = Configured(checkpoint_path=str(path), dtype="bfloat16").setup()
    drawn = Configured(dtype="bfloat16").setup()
    assert torch.equal(loaded.a.weight, weights()["a.weight"].bfloat16())
    assert loaded.load_report.digest.startswith("sha256:") and drawn.load_report is None
    assert torch.equal(loaded.table, drawn.table) and loaded.table.dtype == drawn.table.dtype
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_configured_module_that_lost_a_tensor_is_refused(path):
    with pytest.raises(CheckpointError, match=r"ForgetfulModel has 1 tensors that no checkpoint fills \(rows\[0\]\)"):
        Forgetful(checkpoint_path=str(path)).setup()
