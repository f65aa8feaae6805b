"""Opt-in, what is refused, and the table of hooks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from batch import Layers
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from treeattn.adapters.vllm import hooks, plugin
from treeattn.cli import main

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import json, os, sys
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.plugins import load_general_plugins
def others():
    names = [(one.name, one.value) for one in AttentionBackendEnum]
    return names, {one: path for one, path in registry._ATTN_OVERRIDES.items() if one.name != "CUSTOM"}
before = others()
if OTHER:
    from vllm.v1.attention.backends.registry import register_backend
    register_backend(AttentionBackendEnum.CUSTOM, OTHER)
load_general_plugins()
custom = AttentionBackendEnum.CUSTOM
print(json.dumps({
    "same": before == others(),
    "custom": custom.get_path() if custom.is_overridden() else None,
    "loaded": "treeattn.adapters.vllm.plugin" in sys.modules,
    "backend": "treeattn.adapters.vllm.backend" in sys.modules,
}))
"""


def probe(tmp_path: Path, other: str | None = None, plugins: str | None = None) -> dict[str, Any]:
    """A process where treeattn is installed as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "treeattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: treeattn\nVersion: 0\n")
    points = project["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", f"OTHER = {other!r}\n{PROBE}"], capture_output=True, text=True, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_entry_point_registers_custom_and_nothing_else(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found == {"same": True, "custom": plugin.BACKEND, "loaded": True, "backend": False}


def test_another_plugins_custom_stays(tmp_path: Path) -> None:
    assert probe(tmp_path, other="elsewhere.Backend")["custom"] == "elsewhere.Backend"


def test_vllm_plugins_can_leave_it_out(tmp_path: Path) -> None:
    found = probe(tmp_path, plugins="others")
    assert found == {"same": True, "custom": None, "loaded": False, "backend": False}


def test_register_says_why_it_is_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("vllm.treeattn")
    monkeypatch.setattr(logger, "propagate", True)
    logger.addHandler(caplog.handler)
    try:
        register_backend(AttentionBackendEnum.CUSTOM, "elsewhere.Backend")
        plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "elsewhere.Backend"
        assert "CUSTOM belongs to elsewhere.Backend" in caplog.text
        monkeypatch.delattr("vllm.v1.attention.backends.registry.register_backend")
        plugin.register()
        assert "no place to register a backend" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
        AttentionBackendEnum.CUSTOM.clear_override()
        monkeypatch.undo()
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND


ASKED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0), "attn_type": "decoder",
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"has_sink": True}, {"has_sliding_window": True}, {"kv_cache_dtype": "fp8"}, {"block_size": 1072},
        {"use_adaptive_verification": True}, {"device_capability": DeviceCapability(8, 0)}, {"dtype": torch.float32},
        {"kv_cache_dtype": "fp8_e4m3"}, {"head_size": 256},
    ],
    ids=str,
)  # fmt: skip
def test_what_vllm_may_select_it_for(asked: dict[str, Any]) -> None:
    assert AttentionBackendEnum.CUSTOM.get_class().validate_configuration(**{**ASKED, **asked}) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"use_mla": True}, "treeattn verifies MLA models outside vLLM only"),
        ({"head_size": 512}, "head_size"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"use_mm_prefix": True}, "partial multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability"),
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_dcp": True}, "DCP"),
        ({"use_pcp": True}, "PCP"),
        ({"use_sparse": True}, "sparse"),
    ],
    ids=str,
)
def test_what_it_refuses(asked: dict[str, Any], reason: str) -> None:
    reasons = AttentionBackendEnum.CUSTOM.get_class().validate_configuration(**{**ASKED, **asked})
    assert any(reason in one for one in reasons), reasons


def test_layers_it_refuses() -> None:
    with pytest.raises(NotImplementedError, match="no ALiBi; vLLM's TRITON_ATTN has"):
        Layers(alibi_slopes=[0.5] * 4)


def test_kv_sharing_fast_prefill_is_refused() -> None:
    layers = Layers()
    builder = layers.builders[0]
    layers.config.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(NotImplementedError, match="--kv-sharing-fast-prefill"):
        type(builder)(builder.kv_cache_spec, builder.layer_names, layers.config, torch.device("cpu"), 8)


def test_every_hook_matches_this_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [one for one in hooks.look_up_all() if not one.matches]
    assert not wrong
    hooks.require()
    assert main(["info", "--vllm"]) == 0
    text = capsys.readouterr().out
    assert f"vLLM {hooks.VERSION}; the adapter was made for {hooks.VERSION}" in text
    assert text.count("  matches  ") == len(hooks.HOOKS)


def test_a_changed_hook_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.v1.attention.backends import triton_attn

    def build(self: Any, common_attn_metadata: Any) -> None:
        """Another signature than 0.33 has."""

    monkeypatch.setattr(triton_attn.TritonAttentionMetadataBuilder, "build", build)
    with pytest.raises(ImportError, match=r"MetadataBuilder.build expected .* found \(self, common_attn_metadata\)"):
        hooks.require()
    assert main(["info", "--vllm"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERS  vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build" in text
    gone = hooks.look_up(hooks.Hook("vllm.v1.attention.backends.triton_attn:Nothing"))
    assert not gone.matches
    assert gone.found.startswith("missing:")
    lacking = hooks.look_up(hooks.Hook("vllm.v1.attention.backend:CommonAttentionMetadata", ("num_reqs", "tree")))
    assert (lacking.matches, lacking.found) == (False, "has no tree")


def test_a_hook_that_only_trees_need_does_not_stop_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    monkeypatch.delattr(ModelState, "custom_sampler")
    hooks.require()
    assert [one.hook.where for one in hooks.look_up_all() if not one.matches] == [
        "vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler"
    ]
