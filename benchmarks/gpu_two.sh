#!/usr/bin/env bash
# Everything that is committed of a GPU run, in two calls of ten minutes on a machine with two GPUs and 32 cores, or more calls
# on one GPU.
#
#   PEERS=folder REV=$(git rev-parse HEAD) OUT=folder LIMIT=560 bash benchmarks/gpu_two.sh csrc
#   ... bash benchmarks/gpu_two.sh rest
#   ... bash benchmarks/gpu_two.sh csrc-times, csrc-proof   the two halves of csrc, on a machine with one GPU
#
# csrc  first what a call costs the host, with nothing else running; then times on the first GPU (gqa, mla, kimi, fp8, one
#       after the other), and on the second all of csrc that has no times: its tests, the option sweep, memcheck and racecheck
# rest  times of ragged batches, pages and shapes on the first GPU, then SGLang's rows and the option sweep of Triton's
#       kernels; on the second the other tests and memcheck on Triton's kernels
#
# Both put what they found into a copy of the committed gpu-tests.json, which OUT gets beside the results and one log of the
# ends of all stages. Before: .gpu-cubins (gpu_cubins.py) and .sglang-gpu (sglang_pack.py), without which csrc is compiled
# there (100 s) and SGLang is left out. Seconds of stages on H200s, of 32 cores shared by all: csrc's tests with 13 workers 267 (but for a million tokens),
# memcheck 170, racecheck 172, sweep of csrc with 3 jobs 151; step 19, gqa 146, mla with SGLang 100, kimi 24, fp8 29; further
# 158, other tests with 29 workers on both GPUs (TREEATTN_TEST_GPUS=0,1) 218, memcheck on Triton's kernels beside them 240.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=benchmarks/results}" "${REV:=$(git rev-parse HEAD 2>/dev/null || echo unknown)}" "${LIMIT:=560}"
export PYTHONUNBUFFERED=1 TREEATTN_GIT_REV="$REV"
export PYTHONPATH="$PWD${PEERS:+:$PEERS/fa3:$PEERS/flash_mla_pkg}${PYTHONPATH:+:$PYTHONPATH}"
logs="$(mktemp -d)" parts="$(mktemp -d)"
mkdir -p "$OUT"
[ ! -d .gpu-cubins ] || python3 benchmarks/gpu_cubins.py keep .gpu-cubins
[ ! -f .sglang-gpu/site.tar.xz ] || {
  python3 benchmarks/sglang_pack.py .sglang-gpu --unpack "$parts/site" && export SGLANG_SITE="$parts/site"
}

stage() { # name, GPU, command: until LIMIT, its end to the log
  local name=$1 gpu=$2 begin=$SECONDS
  shift 2
  [ $((LIMIT - SECONDS)) -gt 5 ] || { echo "== $name: no time left" >"$logs/$name"; return; }
  CUDA_VISIBLE_DEVICES=$gpu timeout --signal=INT --kill-after=5 $((LIMIT - SECONDS)) "$@" >"$logs/$name" 2>&1
  echo "== $name: exit status $? after $((SECONDS - begin)) s, at $SECONDS s" >>"$logs/$name"
}

tests() { # name, workers, marks
  stage "$1" "$second" python3 benchmarks/gpu_tests.py --git-rev "$REV" --out "$parts/$1" --jobs "$2" --marks "$3" \
    --time-limit $((LIMIT - SECONDS - 30))
}

sweep() { # backend, GPU, jobs
  stage "check-$1" "$2" python3 benchmarks/gpu_sweep.py --git-rev "$REV" --out "$parts/check-$1" --backend "$1" --jobs "$3"
}

sanitizer() { # tool, backend
  local macros=""
  [ "$1" != racecheck ] || macros=TREEATTN_LANES_ARRIVE=1 # benchmarks/sanitize.py says why
  stage "$1-$2" "$second" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 TREEATTN_CUDA_MACROS="$macros" \
    compute-sanitizer --tool "$1" --error-exitcode 9 python3 benchmarks/sanitize.py --backend "$2"
}

csrc_times() {
  stage gqa 0 python3 -m treeattn bench gqa --out "$parts/gqa.json"
  for name in mla kimi fp8; do stage "$name" 0 bash benchmarks/gpu.sh "$name"; done
}

csrc_proof() {
  tests csrc "$1" csrc &
  sweep cuda "$second" 3 &
  sanitizer memcheck cuda &
  sanitizer racecheck cuda &
  wait
}

second=1
case ${1:-} in
  csrc)
    stage step 0 python3 -m treeattn bench step --out "$parts/step.json"
    csrc_times &
    csrc_proof 13 &
    ;;
  csrc-times)
    stage step 0 python3 -m treeattn bench step --out "$parts/step.json"
    csrc_times
    stage further 0 bash benchmarks/gpu.sh further
    ;;
  csrc-proof)
    second=0
    csrc_proof 12
    ;;
  rest)
    (
      stage further 0 bash benchmarks/gpu.sh further
      [ -z "${SGLANG_SITE:-}" ] ||
        stage sglang 0 python3 benchmarks/sglang_rows.py --source "$SGLANG_SITE" --git-rev "$REV" --out "$OUT/h200-sglang.json"
      sweep triton 0 12
    ) &
    tests tests 20 "not weights and not csrc" &
    sanitizer memcheck triton &
    ;;
  *)
    echo "usage: gpu_two.sh csrc|rest|csrc-times|csrc-proof" >&2
    exit 2
    ;;
esac
wait
python3 - "$parts" "$OUT" <<'EOF'
"""The rows of `step` behind those of `gqa`; counts of tests and sweeps into what is committed."""
import json, sys
from pathlib import Path
parts, out = map(Path, sys.argv[1:])
def read(path):
    return json.loads(path.read_text()) if path.is_file() else None
gqa, step = read(parts / "gqa.json"), read(parts / "step.json")
if gqa and step:
    from treeattn.bench.run import save
    gqa["rows"] += step["rows"]
    save(gqa, out / "h200-gqa.json")
found = read(Path("benchmarks/results/gpu-tests.json")) or {}
if tests := read(parts / "tests/gpu-tests.json"):
    found |= tests
if csrc := read(parts / "csrc/gpu-tests.json"):
    found["csrc"] = {key: csrc[key] for key in ("git_rev", "passed", "failed", "skipped", "date")}
for backend in ("triton", "cuda"):
    found |= read(parts / f"check-{backend}" / "gpu-tests.json") or {}
(out / "gpu-tests.json").write_text(json.dumps(found, indent=2) + "\n")
EOF
for log in "$logs"/*; do
  echo "##### $(basename "$log")"
  grep -E "FAILED|ERROR|^E  |WRONG|Error|Hazard|hazard" "$log" | sort | uniq -c | head -60
  tail -25 "$log"
done | cut -c1-400 >"$OUT/gpu-two.log"
for name in tests csrc; do
  [ ! -f "$parts/$name/gpu-tests.log" ] || tail -c 400000 "$parts/$name/gpu-tests.log" >"$OUT/$name-failures.log"
done
for log in "$logs"/*; do tail -n 2 "$log" | cut -c1-300; done
