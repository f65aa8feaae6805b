#!/usr/bin/env bash
# What is measured and proved on a GPU, stage by stage, from a source tree that is not installed.
#
#   REV=$(git rev-parse HEAD) OUT=benchmarks/results bash benchmarks/gpu.sh bench tests sanitize check demo
#
# bench     treeattn bench gqa step -> h200-gqa.json (FlashAttention-3 beside it where flash_attn_interface imports)
# mla       treeattn bench mla -> h200-mla.json (FlashMLA and SGLang's Triton path beside it where they import)
# fp8       treeattn bench fp8 -> h200-fp8.json, each shape with a bf16 and an e4m3 cache
# further   treeattn bench ragged pages shapes -> h200-further.json, with the peers that import
# kimi      treeattn bench kimi -> h200-kimi.json, the attention of a verify step of Kimi K2.6 on one GPU of eight, as mla
# tests     the test suite on the GPU -> gpu-tests.json
# sanitize  compute-sanitizer memcheck on a small run of each kernel
# sanitize-cuda  memcheck and racecheck on a small run of the kernels of csrc
# check     the option table swept at random, CASES cases, and an injected fault -> check in gpu-tests.json
# demo      draft trees through a CUDA graph: float32 exact, bfloat16 with the first divergence, and without a graph
#
# Each stage prints its seconds and exit status; the script fails if one did. Peers: PEERS=folder that holds fa3/ and
# flash_mla_pkg/; others (flashinfer, sglang) are found where they are installed or on PYTHONPATH, SGLang's kernel also in
# SGLANG_SITE, a folder where sglang_pack.py has unpacked it.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=benchmarks/results}" "${REV:=$(git rev-parse HEAD 2>/dev/null || echo unknown)}" "${CASES:=2000}"
export PYTHONPATH="$PWD${PEERS:+:$PEERS/fa3:$PEERS/flash_mla_pkg}${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TREEATTN_GIT_REV="$REV"
run=(python3 -m treeattn) sglang=()
if [ -n "${SGLANG_SITE:-}" ]; then
  run=(python3 benchmarks/with_sglang.py "$SGLANG_SITE") sglang=(sglang_extend)
elif python3 -c "import sglang" 2>/dev/null; then
  sglang=(sglang_extend)
fi
failed=0

stage() {
  local name=$1 begin=$SECONDS status
  shift
  echo "== $name: $*"
  "$@"
  status=$?
  echo "== $name: exit status $status after $((SECONDS - begin)) s"
  [ "$status" -eq 0 ] || failed=1
}

for name in "${@:-bench}"; do
  case $name in
    bench) stage bench python3 -m treeattn bench gqa step --out "$OUT/h200-gqa.json" ;;
    mla | kimi)
      stage "$name" "${run[@]}" bench "$name" --providers treeattn_cuda treeattn_triton flashmla_causal "${sglang[@]}" \
        --out "$OUT/h200-$name.json"
      ;;
    further) stage further python3 -m treeattn bench ragged pages shapes --out "$OUT/h200-further.json" ;;
    fp8) stage fp8 python3 -m treeattn bench fp8 --providers treeattn_cuda treeattn_triton --out "$OUT/h200-fp8.json" ;;
    tests) stage tests python3 benchmarks/gpu_tests.py --git-rev "$REV" --out "$OUT" ;;
    sanitize)
      stage sanitize env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/sanitize.py
      ;;
    sanitize-cuda)
      for tool in memcheck racecheck; do
        macros=""
        [ "$tool" = memcheck ] || macros=TREEATTN_LANES_ARRIVE=1 # benchmarks/sanitize.py says why
        stage "$name-$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 TREEATTN_CUDA_MACROS="$macros" \
          compute-sanitizer --tool "$tool" --error-exitcode 9 python3 benchmarks/sanitize.py --backend cuda
      done
      ;;
    check)
      for backend in triton cuda; do
        stage "check-$backend" python3 benchmarks/gpu_sweep.py --git-rev "$REV" --out "$OUT" --cases "$CASES" --backend "$backend"
      done
      ;;
    demo)
      stage demo python3 -m treeattn demo --device cuda
      stage demo-bf16 python3 -m treeattn demo --device cuda --dtype bfloat16
      stage demo-eager python3 -m treeattn demo --device cuda --no-graph
      ;;
    *) echo "no stage $name" >&2; failed=1 ;;
  esac
done
exit "$failed"
