#!/usr/bin/env bash
# SGLang and what its attention imports, for a machine with a GPU and no network: .sglang-gpu/site.tar.xz, which git
# ignores.
#
#   bash benchmarks/sglang_gpu_site.sh [PYTHON_VERSION]        here; Python of the machine with the GPU, 3.12 by default
#   mkdir site && tar -xJf .sglang-gpu/site.tar.xz -C site     there, beside its own torch, Triton, numpy and pytest
#   PYTHONPATH=site:. TREEATTN_TEST_DEVICE=cuda python -m pytest -q --confcutdir=tests/adapters \
#       tests/adapters/sglang/test_{trees,windows,builders,kit}.py
#
# What the machine's torch brings, pytest, and what only a server runs is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version="${1:-3.12}" out=.sglang-gpu
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
left_out='torch|triton|numpy|sympy|mpmath|networkx|Jinja2|MarkupSafe|filelock|fsspec|setuptools|pytest|pytest-xdist'
left_out+='|execnet'
grep -vE "^(#|($left_out)==)" tests/adapters/sglang/requirements.txt >"$work/requirements.txt"
platforms=()
for glibc in 2_34 2_28 2_27 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
python3 -m pip --disable-pip-version-check install -q --target "$work/site" --python-version "$version" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --only-binary=:all: --no-deps --no-compile \
    -r "$work/requirements.txt"
mkdir -p "$out"
tar -C "$work/site" --exclude=./sglang/multimodal_gen --exclude=./sglang/srt/rust_extensions \
    --exclude=./sglang/benchmark --exclude=configs/*.json --exclude=./bin -cf - . | xz -T2 -3 >"$out/site.tar.xz"
du -h "$out/site.tar.xz"
