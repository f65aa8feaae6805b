# Experiments on two GPUs: 0 times, 1 stamps, pages, profile, mixed widths, then racecheck's patterns. Run in the checkout: bash scratch/call_a.sh
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch
mkdir -p /tmp/c
build() { # variant, sources: compile into its own cache
  (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait)
}
one() { # variant, gpu, script, args
  (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 150 python3 $S/$3 "${@:4}" 2>&1 | tail -40)
}
for v in v0 fp firstq warm page1 v1 v2 v5 stamp merge; do build $v attention_sm90_d128.cu mla_sm90.cu & done
nvcc -std=c++17 -O2 -arch=sm_90a -o /tmp/rp $S/racepatterns.cu &
wait; echo "built at $SECONDS"
(
  for v in v0 fp warm v0 fp warm; do NOGATE=1 one $v 0 rows.py $v cuda gqa 0,1,2,4,7,9,10,15,16; done
  for v in v0 fp firstq warm; do one $v 0 rows.py $v cuda mla 0,1,3,4,6,9,10; done
  for v in v0 fp; do (cd $S/v/$v; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$v CUDA_VISIBLE_DEVICES=0 timeout 60 python3 -m treeattn bench step 2>&1 | grep -i "update\|step" | tail -12); done
  for d in 128 64 32; do export LEAST_DIMS=$d; NOGATE=1 one merge 0 rows.py dims$d cuda mla 0,1,6; NOGATE=1 one merge 0 rows.py dims$d triton gqa 1,4,7; done
  echo "gpu 0 at $SECONDS"
) > $OUT/times.txt 2>&1 &
(
  one stamp 1 stamps.py > $OUT/stamps.txt 2>&1
  for v in v0 v2 page1; do one $v 1 pages1.py $v 0,2,3,4,6; done
  for v in v1 v5; do NOGATE=1 one $v 1 pages1.py $v 0,3,6; done
  (cd $S/v/v0; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/v0 CUDA_VISIBLE_DEVICES=1 timeout 100 ncu --clock-control none -k regex:attention_sm90 --launch-skip 2 -c 1 --section SourceCounters --section WarpStateStats --section SpeedOfLight --page source --csv python3 $S/prof1.py > /tmp/prof.csv 2>/tmp/prof.err; python3 $S/hot.py /tmp/prof.csv || tail -5 /tmp/prof.err)
  (cd $R; CUDA_VISIBLE_DEVICES=1 PYTHONPATH=$R TREEATTN_CACHE_DIR=/tmp/c/v0 timeout 120 python3 benchmarks/tune.py --sets ragged --configs c1 c2 c3 --out $OUT/tune-ragged.json)
  for p in 1 2 3 4 5 6 7 8 9 10 11 12; do CUDA_VISIBLE_DEVICES=1 timeout 60 compute-sanitizer --tool racecheck --racecheck-report all /tmp/rp $p 2>&1 | grep -E "pattern|SUMMARY|hazard" | tail -2; done > $OUT/race.txt 2>&1
  echo "gpu 1 at $SECONDS"
) > $OUT/pages.txt 2>&1 &
wait
cat $OUT/times.txt $OUT/race.txt $OUT/pages.txt $OUT/stamps.txt | cut -c1-900
