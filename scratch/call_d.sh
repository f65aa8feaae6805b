export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; M=$S/v/mm
mkdir -p /tmp/c; cp -r $S/c/. /tmp/c/
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 100 python3 -W ignore $S/$3 "${@:4}" 2>&1 | tail -40) }
(
  one mm 0 rows.py mm cuda mla 0,1,3,4,6,7,9,10,12,13,2
  NOGATE=1 one v0 0 rows.py v0 cuda mla 0,1,3,4,6,7,9,10,12,13,2
  for v in mm v0; do NOGATE=1 one $v 0 rows.py $v cuda gqa 0,1,4,7,10,13,15,16,18; done
  echo "gpu 0 at $SECONDS"
) > $OUT/times.txt 2>&1 &
(
  cd $M; export CUDA_VISIBLE_DEVICES=1 PYTHONPATH=$M TREEATTN_CACHE_DIR=/tmp/c/mm
  timeout 75 python3 -m pytest -q -x -n 10 tests/gpu/test_cuda_gpu.py -k "mla" -p no:cacheprovider 2>&1 | tail -12
  echo "tests at $SECONDS"
  for i in 1 2 3 4; do timeout 40 python3 -W ignore tests/repeated_calls.py --heads 8 --kv-heads 1 --dim 576 --seconds 12 2>&1 | tail -3 & done; wait
  echo "gpu 1 at $SECONDS"
) > $OUT/tests.txt 2>&1 &
wait
cat $OUT/times.txt $OUT/tests.txt | cut -c1-900
