"""Where CUDA graphs cannot work they are refused before a rollout begins, with what to do."""

from __future__ import annotations

import pytest

from flashdreams.acceleration import cuda_graph
from flashdreams.acceleration.graph_backend import check_allocator
from flashdreams.config import ConfigError, derive_config
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import accelerate
from tape_graphs import TapeBackend
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(monkeypatch, variable):
    check_allocator({variable: "max_split_size_mb:64, expandable_segments:False"})
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(UserError, match=rf"{variable} is .*take expandable_segments out of it"):
        cuda_graph.apply(template_pipeline(), backend=TapeBackend())


def test_a_pipeline_that_graphs_do_not_fit_is_refused():
    with pytest.raises(UserError, match=r"template is on cpu; CUDA graphs need a CUDA device"):
        cuda_graph.apply(template_pipeline())
    with pytest.raises(UserError, match="choose --device cuda"):
        accelerate(template_pipeline(), AccelerationConfig(cuda_graph=True))
    with pytest.raises(ConfigError, match="cuda_graph and offload blocks exclude each other"):
        AccelerationConfig(cuda_graph=True, offload="blocks").validate()
    with pytest.raises(ConfigError, match="cuda_graph_slots is 0"):
        AccelerationConfig(cuda_graph_slots=0).validate()
    pipeline = template_pipeline()
    pipeline.config = derive_config(pipeline.config, diffusion_model={"swap_experts": True})
    with pytest.raises(UserError, match="set swap_experts to False"):
        cuda_graph.apply(pipeline, backend=TapeBackend())
