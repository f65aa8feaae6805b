"""Opt-in, the check of hooks, and what a person sees of both."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from treeattn import cli
from treeattn.adapters.sglang import hooks, plugin

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[3]
ROOT_OF_SGLANG = hooks.sglang_root()
DISCOVER = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from sglang.srt.plugins import load_plugins
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
before = dict(ATTENTION_BACKENDS)
load_plugins()
changed = [name for name in ATTENTION_BACKENDS if ATTENTION_BACKENDS[name] is not before.get(name)]
gpu_code = any(name.endswith(("extend_attention", "triton_backend", "adapters.sglang.backend")) for name in sys.modules)
print("changed", changed, "kernels imported", gpu_code)
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The files of SGLang that the hooks look at, to be changed."""
    for hook in hooks.HOOKS:
        target = tmp_path / hook.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT_OF_SGLANG / hook.path, target)
    return tmp_path


def edit(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new))


def test_every_hook_fits() -> None:
    assert hooks.sglang_version() in hooks.TESTED
    assert hooks.problems(hooks.check_hooks()) == []


@pytest.mark.parametrize("hook", [hook for hook in hooks.HOOKS if hook.kind == "function"], ids=lambda hook: hook.title)
def test_signatures_are_read_right(hook: hooks.Hook) -> None:
    """What is parsed is what Python says of the function."""
    import importlib

    module = "sglang." + hook.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = importlib.import_module(module)
    for name in hook.name.split("."):
        found = getattr(found, name)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(found).parameters.values()
    assert tuple(stars.get(p.kind, "") + p.name for p in parameters) == hook.expected


CHANGES = {
    "a parameter renamed": (
        "srt/layers/attention/triton_backend.py", "    def init_forward_metadata(self, forward_batch: ForwardBatch)",
        "    def init_forward_metadata(self, batch: ForwardBatch)",
        "TritonAttnBackend.init_forward_metadata: parameters are gone: forward_batch; parameters are new: batch",
    ),
    "a parameter added": (
        "kernels/ops/attention/extend_attention.py", "    identity_kv_indices: bool = False,\n):",
        "    identity_kv_indices: bool = False,\n    twist=None,\n):",
        "extend_attention.extend_attention_fwd: parameters are new: twist",
    ),
    "an order changed": (
        "srt/layers/attention/triton_backend.py", "        max_bs: int,\n        max_num_tokens: int,",
        "        max_num_tokens: int,\n        max_bs: int,",
        "init_cuda_graph_state: parameters have another order: self, max_num_tokens, max_bs",
    ),
    "a function gone": (
        "srt/layers/attention/triton_backend.py", "def _forward_extend_kernel(", "def _run_extend_kernel(",
        "TritonAttnBackend._forward_extend_kernel: there is no such function",
    ),
    "an attribute gone": (
        "srt/layers/attention/triton_backend.py", "self.cuda_graph_window_kv_offsets", "self.window_offsets",
        "TritonAttnBackend (attributes): it has no cuda_graph_window_kv_offsets",
    ),
    "a field gone": (
        "srt/layers/attention/verify_mask.py", "    mode: TreeMaskMode\n", "    form: TreeMaskMode\n",
        "verify_mask.VerifyMask (fields): it has no mode",
    ),
    "a class gone": (
        "srt/speculative/eagle_info.py", "class EagleVerifyInput(", "class EagleInput(",
        "eagle_info.EagleVerifyInput (fields): there is no such class",
    ),
    "a name gone": (
        "srt/speculative/eagle_utils.py", "TreeMaskMode", "MaskMode", "eagle_utils (names): it has no TreeMaskMode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_hook_switches_off(
    copied: Path, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    path, old, new, words = CHANGES[change]
    assert hooks.problems(hooks.check_hooks(copied)) == []
    edit(copied, path, old, new)
    found = hooks.problems(hooks.check_hooks(copied))
    assert len(found) == 1
    assert words in found[0]
    monkeypatch.setenv(plugin.ENABLE, "1")
    monkeypatch.setattr(hooks, "sglang_root", lambda: copied)
    before = dict(ATTENTION_BACKENDS)
    with caplog.at_level(logging.ERROR, "treeattn.sglang"):
        assert not plugin.register()
    assert before == ATTENTION_BACKENDS
    message = caplog.records[-1].getMessage()
    assert "treeattn is OFF" in message
    assert words in message


def test_a_file_gone(copied: Path) -> None:
    (copied / "srt/layers/attention/verify_mask.py").unlink()
    expected = "verify_mask.VerifyMask (fields): there is no srt/layers/attention/verify_mask.py"
    assert hooks.problems(hooks.check_hooks(copied)) == [expected]


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_opt_in(setting: str | None, tmp_path: Path) -> None:
    """As SGLang discovers it: installed, it changes nothing until it is asked to, and never imports the kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["sglang.srt.plugins"]
    info = tmp_path / "treeattn-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: treeattn\nVersion: 0.0.0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in group.items())
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{lines}\n")
    stubs = Path(__file__).parent / "stubs"
    environment = {key: value for key, value in os.environ.items() if key != plugin.ENABLE}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT), str(stubs)])
    if setting is not None:
        environment[plugin.ENABLE] = setting
    done = subprocess.run(
        [sys.executable, "-c", DISCOVER], env=environment, capture_output=True, text=True, check=True
    )
    on = setting == "1"
    assert f"changed {['triton'] if on else []} kernels imported False" in done.stdout, done.stderr
    assert ("verifies with treeattn" in done.stderr) == on


def test_a_release_that_was_not_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", ATTENTION_BACKENDS["triton"])
    monkeypatch.setenv(plugin.ENABLE, "1")
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.9.9")
    with caplog.at_level(logging.WARNING, "treeattn.sglang"):
        assert plugin.register()
    assert caplog.messages == [
        "treeattn was tried with SGLang 0.5.23, 0.5.22, this is 0.9.9: every hook fits, nothing more is known"
    ]


def test_a_setting_that_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ENABLE, "maybe")
    with pytest.raises(ValueError, match="TREEATTN_SGLANG is 'maybe', must be one of 1, true"):
        plugin.register()


def test_info(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    monkeypatch.delenv(plugin.ENABLE, raising=False)
    assert cli.main(["info", "--sglang"]) == 0
    out = capsys.readouterr().out
    assert f"sglang {hooks.sglang_version()} (tried with {', '.join(hooks.TESTED)})" in out
    assert "off: TREEATTN_SGLANG is not set (every hook fits)" in out
    assert out.count("fits") == len(hooks.HOOKS) + 1
    monkeypatch.setenv(plugin.ENABLE, "1")
    assert cli.main(["info", "--sglang"]) == 0
    assert "(entry point sglang.srt.plugins): on" in capsys.readouterr().out
    edit(copied, "srt/layers/attention/verify_mask.py", "    mode: TreeMaskMode\n", "    form: TreeMaskMode\n")
    monkeypatch.setattr(hooks, "sglang_root", lambda: copied)
    assert cli.main(["info", "--sglang"]) == 1
    out = capsys.readouterr().out
    assert f"off: 1 of {len(hooks.HOOKS)} hooks do not fit" in out
    assert "it has no mode" in out


def test_info_without_sglang(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hooks, "sglang_root", lambda: None)
    monkeypatch.setattr(plugin, "sglang_version", lambda: None)
    assert cli.main(["info", "--sglang"]) == 1
    assert "SGLang is not installed here" in capsys.readouterr().out


def test_encoder_decoder_models_get_sglangs_own_refusal(served: list) -> None:
    from types import SimpleNamespace

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    runner = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=True))
    with pytest.raises(AssertionError, match="Cross attention is not supported"):
        ATTENTION_BACKENDS["triton"](runner)
