"""A trainable LoRA has the gradients of its factors, and its file makes of a model what training made of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flashdreams.core.checkpoint.lora import LoraSet
from flashdreams.posttrain.lora import TrainableLora

pytestmark = pytest.mark.ci_cpu


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"attn": nn.ModuleDict({"q": nn.Linear(6, 5), "o": nn.Linear(5, 5)}), "head": nn.Linear(5, 2)}
    ).to(dtype)


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module["head"](torch.tanh(module["attn"]["o"](torch.tanh(module["attn"]["q"](x)))))


def trained(module: nn.Module, steps: int = 3) -> TrainableLora:
    lora = TrainableLora(module, ("attn.q", "attn.o"), rank=2, seed=1)
    optimizer = torch.optim.AdamW(lora.parameters, lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(module["head"].weight.dtype)
        run(module, x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        lora.merge()
    return lora


def test_nothing_changes_before_the_first_step():
    plain, module = network(), network()
    TrainableLora(module, ("attn.q", "attn.o"), rank=2, seed=1).merge()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


def test_gradients_are_those_of_the_factors():
    """Against autograd through ``base + up @ down``, over two passes that add up, in float64."""
    module, reference = network(torch.float64), network(torch.float64)
    lora = trained(module)
    factors = {name: (lora.up[name].detach().clone(), lora.down[name].detach().clone()) for name in lora.weights}
    for up, down in factors.values():
        up.requires_grad_(), down.requires_grad_()
    merged = {f"{name}.weight": lora.base[name] + up @ down for name, (up, down) in factors.items()}
    for seed in (8, 9):
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        run(module, x).square().sum().backward()
        weights = {**dict(reference.named_parameters()), **merged}
        hidden = x
        for name in ("attn.q", "attn.o"):
            hidden = torch.tanh(nn.functional.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        out = nn.functional.linear(hidden, weights["head.weight"], weights["head.bias"])
        out.square().sum().backward(retain_graph=True)
    for name, (up, down) in factors.items():
        torch.testing.assert_close(lora.up[name].grad, up.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lora.down[name].grad, down.grad, rtol=1e-12, atol=1e-12)
        assert lora.weights[name].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_gives_another_model_the_very_weights_of_training(dtype, tmp_path):
    module, other = network(dtype), network(dtype)
    save_file(
        {name: value.contiguous() for name, value in trained(module).state_dict().items()},
        tmp_path / "lora.safetensors",
    )
    before = other["attn"]["q"].weight.detach().clone()
    LoraSet(other).add("trained", tmp_path / "lora.safetensors")
    assert not torch.equal(other["attn"]["q"].weight, before)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_a_saved_state_goes_on(tmp_path):
    one, two = network(), network()
    state = trained(one).state_dict()
    lora = TrainableLora(two, ("attn.q", "attn.o"), rank=2, seed=99)
    lora.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="ModuleDict has no linear layers named ffn.0"):
        TrainableLora(network(), ("ffn.0",), rank=2, seed=1)
