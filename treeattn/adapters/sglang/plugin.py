"""The entry point that SGLang loads (``sglang.srt.plugins``); it changes nothing unless it is asked to.

``TREEATTN_SGLANG=1`` switches it on. Every process of a server loads it, before backends are made; it checks what it
needs (:mod:`.hooks`) and, if all of it fits, registers :class:`.backend.TritonAttnBackend` under SGLang's own name
``triton``, so that whatever SGLang keeps by that name still holds.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .hooks import TESTED, check_hooks, problems, sglang_version

ENABLE = "TREEATTN_SGLANG"
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")

logger = logging.getLogger("treeattn.sglang")


def enabled() -> bool:
    """Whether the environment asks for the plugin.

    Raises
    ------
    ValueError
        If the variable says neither yes nor no.
    """
    setting = os.environ.get(ENABLE, "").strip().lower()
    if setting in _OFF:
        return False
    if setting in _ON:
        return True
    raise ValueError(f"{ENABLE} is {setting!r}, must be one of {', '.join(_ON)} or {', '.join(filter(None, _OFF))}")


def register() -> bool:
    """Register the backend if the environment asks for it and SGLang is as expected; whether it was registered.

    SGLang swallows what a plugin raises, so what is wrong is logged here, hook by hook.
    """
    if not enabled():
        logger.debug("treeattn is installed and off: %s=1 switches it on", ENABLE)
        return False
    version, wrong = sglang_version(), problems(check_hooks())
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        logger.error(
            "treeattn is OFF: SGLang %s is not as treeattn expects (tried with %s); target verify stays with SGLang.%s",
            version, ", ".join(TESTED), lines,
        )  # fmt: skip
        return False
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    original = ATTENTION_BACKENDS["triton"]

    def create_triton_backend(runner: Any) -> Any:
        if runner.model_config.is_encoder_decoder:
            return original(runner)  # which says what it does not do
        from .backend import TritonAttnBackend

        return TritonAttnBackend(runner)

    register_attention_backend("triton")(create_triton_backend)
    if version not in TESTED:
        logger.warning(
            "treeattn was tried with SGLang %s, this is %s: every hook fits, nothing more is known",
            ", ".join(TESTED), version,
        )  # fmt: skip
    logger.info("treeattn: the attention backend 'triton' of SGLang %s verifies with treeattn", version)
    return True


def report() -> tuple[str, bool]:
    """What ``treeattn info --sglang`` prints, and whether the plugin would register."""
    version, checks = sglang_version(), check_hooks()
    wrong = problems(checks)
    on = enabled()
    if version is None:
        verdict = "SGLang is not installed here"
    elif wrong:
        verdict = f"off: {len(wrong)} of {len(checks)} hooks do not fit"
    else:
        verdict = "on" if on else f"off: {ENABLE} is not set (every hook fits)"
    width = max(len(check.hook.title) for check in checks)
    rows = [f"  {check.hook.title:{width}}  {check.problem or 'fits'}" for check in checks]
    lines = [
        f"sglang {version or 'not installed'} (tried with {', '.join(TESTED)})",
        f"plugin treeattn (entry point sglang.srt.plugins): {verdict}",
        "hooks:",
        *rows,
    ]
    return "\n".join(lines), version is not None and not wrong
