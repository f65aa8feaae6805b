#!/usr/bin/env bash
# Everything that is committed of a GPU run, in about six minutes on a machine with two GPUs and 32 cores.
#
#   PEERS=folder REV=$(git rev-parse HEAD) OUT=folder LIMIT=400 bash benchmarks/gpu_two.sh
#
# First what a call costs the host, with nothing else running; then times on the first GPU, and on the second all that
# has no times: tests, the option sweep, the sanitizers. With .sglang-gpu (sglang_pack.py) also SGLang's rows, and its
# backend's tests. Few files are left in OUT: results, and one log of the ends of all stages. Sizes of stages, in seconds, on an
# H200: step 10, gqa 105 (with fa3_cascade), mla 30, fp8 20, SGLang's rows 120; tests with 17 workers 240 beside the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=benchmarks/results}" "${REV:=$(git rev-parse HEAD 2>/dev/null || echo unknown)}" "${LIMIT:=400}"
export PYTHONUNBUFFERED=1 TREEATTN_GIT_REV="$REV"
export PYTHONPATH="$PWD${PEERS:+:$PEERS/fa3:$PEERS/flash_mla_pkg}${PYTHONPATH:+:$PYTHONPATH}"
logs="$(mktemp -d)" parts="$(mktemp -d)"
mkdir -p "$OUT"

stage() { # name, GPU, command: until LIMIT, its end to the log
  local name=$1 gpu=$2 begin=$SECONDS
  shift 2
  [ $((LIMIT - SECONDS)) -gt 5 ] || { echo "== $name: no time left" >"$logs/$name"; return; }
  CUDA_VISIBLE_DEVICES=$gpu timeout --signal=INT --kill-after=5 $((LIMIT - SECONDS)) "$@" >"$logs/$name" 2>&1
  echo "== $name: exit status $? after $((SECONDS - begin)) s, at $SECONDS s" >>"$logs/$name"
}

tests() { # name, workers, marks
  stage "$1" 1 python3 benchmarks/gpu_tests.py --git-rev "$REV" --out "$parts/$1" --jobs "$2" --marks "$3" \
    --time-limit $((LIMIT - SECONDS - 30))
}

stage step 0 python3 -m treeattn bench step --out "$parts/step.json"
(
  stage gqa 0 python3 -m treeattn bench gqa --out "$parts/gqa.json"
  stage mla 0 bash benchmarks/gpu.sh mla
  stage fp8 0 bash benchmarks/gpu.sh fp8
  [ ! -f .sglang-gpu/site.tar.xz ] || {
    python3 benchmarks/sglang_pack.py .sglang-gpu --unpack "$parts/site"
    stage sglang 0 python3 benchmarks/sglang_rows.py --source "$parts/site" --git-rev "$REV" --out "$OUT/h200-sglang.json"
  }
) &
tests tests 15 "not weights and not csrc" &
tests csrc 6 csrc &
stage sweep 1 python3 benchmarks/gpu_sweep.py --git-rev "$REV" --out "$parts/sweep" --jobs 6 &
stage sweep-cuda 1 python3 benchmarks/gpu_sweep.py --git-rev "$REV" --out "$parts/sweep-cuda" --jobs 4 --backend cuda &
(
  stage sanitize 1 bash benchmarks/gpu.sh sanitize
  stage sanitize-cuda 1 bash benchmarks/gpu.sh sanitize-cuda
) &
wait
python3 - "$parts" "$OUT" <<'EOF'
"""The rows of `step` behind those of `gqa`; the counts of both test runs and the sweep in one file."""
import json, sys
from pathlib import Path
parts, out = map(Path, sys.argv[1:])
def read(name):
    path = parts / name
    return json.loads(path.read_text()) if path.is_file() else None
gqa, step = read("gqa.json"), read("step.json")
if gqa and step:
    from treeattn.bench.run import save
    gqa["rows"] += step["rows"]
    save(gqa, out / "h200-gqa.json")
tests, csrc = read("tests/gpu-tests.json"), read("csrc/gpu-tests.json")
if tests:
    if csrc:
        tests["csrc"] = {key: csrc[key] for key in ("passed", "failed", "skipped")}
    for name in ("sweep", "sweep-cuda"):
        tests |= read(f"{name}/gpu-tests.json") or {}
    (out / "gpu-tests.json").write_text(json.dumps(tests, indent=2) + "\n")
EOF
for log in "$logs"/*; do
  echo "##### $(basename "$log")"
  grep -E "FAILED|ERROR|^E  |WRONG|Error" "$log" | sort | uniq -c | head -60
  tail -25 "$log"
done | cut -c1-400 >"$OUT/gpu-two.log"
for name in tests csrc; do
  [ ! -f "$parts/$name/gpu-tests.log" ] || tail -c 400000 "$parts/$name/gpu-tests.log" >"$OUT/$name-failures.log"
done
for log in "$logs"/*; do tail -n 2 "$log" | cut -c1-300; done
