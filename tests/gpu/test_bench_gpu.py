"""The benchmark's CUDA side: graphs, cold copies, every provider that is here, the gate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from treeattn.bench.inputs import Inputs
from treeattn.bench.providers import PROVIDERS, Calls, unavailable, usual_providers
from treeattn.bench.run import environment, run_workloads
from treeattn.bench.timing import measure_ceilings, time_graph
from treeattn.bench.workloads import Workload

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BASE = Workload("gpu", 2, 17, 300, 8, 2)
MLA = dataclasses.replace(BASE, kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True)
PROVIDERS_HERE = (*usual_providers(CUDA), "flex_attention", "vllm_qq_bias")


@pytest.mark.parametrize(
    "work",
    [
        BASE,
        dataclasses.replace(BASE, page_size=1),
        dataclasses.replace(BASE, kv_layout="HND", page_size=16),
        dataclasses.replace(BASE, prefixes=(31, 700), q_lens=(17, 4)),
        dataclasses.replace(BASE, nodes=9),
        dataclasses.replace(BASE, batch=1),
        dataclasses.replace(BASE, head_dim=64, dtype="float16"),
        MLA,
        dataclasses.replace(BASE, kv_dtype="float8_e4m3fn"),
    ],
    ids=lambda work: work.name(),
)
def test_every_provider_passes_the_gate(work: Workload) -> None:
    here = [name for name in PROVIDERS_HERE if unavailable(name, CUDA, [work]) is None]
    result = run_workloads([work], here, CUDA, cold_bytes=4e6)
    assert result["failed"] == []
    assert "treeattn_triton" in {row["provider"] for row in result["rows"]}
    for row in result["rows"]:
        assert 0.5 < row["p20"] <= row["us"] <= row["p80"] < 1e5
        assert row["rel_err"] < 1e-2


def test_step_rows() -> None:
    rows = run_workloads([dataclasses.replace(BASE, kind="step")], ["treeattn_triton"], CUDA)["rows"]
    assert [row["kind"] for row in rows] == ["step-update", "step-update-host", "step-call-host"]


def test_copies_are_cold() -> None:
    inputs = Inputs(BASE, CUDA)
    assert inputs.copies * BASE.kv_bytes >= 256e6
    (calls,) = PROVIDERS["treeattn_triton"](inputs)
    assert isinstance(calls, Calls)
    assert len(calls.calls) == inputs.copies
    assert len({paged.data_ptr() for paged in calls.paged.k}) == inputs.copies if calls.paged else False


def test_graph_time_is_device_time() -> None:
    block = torch.ones(64 * 2**20, device="cuda")
    copy = torch.empty_like(block)
    timing = time_graph([lambda: copy.copy_(block)])
    assert 100 < timing.us < 2000


def test_ceilings() -> None:
    found = measure_ceilings(CUDA)
    assert 0.2 < found["copy_tb_s"] < 20
    assert 20 < found["bf16_tflop_s"] < 5000


def test_environment() -> None:
    env = environment(CUDA)
    assert env["gpu"] == torch.cuda.get_device_name(0)
    assert env["triton"]
