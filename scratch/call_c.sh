export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch
mkdir -p /tmp/c; cp -r $S/c/. /tmp/c/
build() { (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait) }
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 150 python3 -W ignore $S/$3 "${@:4}" 2>&1 | tail -40) }
for v in v0 mm page3 fl22; do build $v attention_sm90_d128.cu mla_sm90.cu & done
wait; echo "built at $SECONDS"
(
  one mm 0 rows.py mm cuda mla 0,1,3,4,6,7,9,10,12
  NOGATE=1 one v0 0 rows.py v0 cuda mla 0,1,3,4,6,7,9,10,12
  NOGATE=1 one mm 0 rows.py mm cuda mla 0,1,2,3,4,5,6,7,9,10,12,13
  for v in fl22 v0; do NOGATE=1 one $v 0 rows.py $v cuda gqa 1,4,7,10,13,22,25; done
  echo "gpu 0 at $SECONDS"
) > $OUT/times.txt 2>&1 &
(
  for v in page3; do one $v 1 pages1.py $v 0,1,2,3,4,5; done
  for d in "128 512" "32 32" "64 32" "64 64" "32 64"; do set -- $d; export LEAST_DIMS=$1 PARTS_CAP=$2; NOGATE=1 one merge 1 rows.py dims$1,$2 triton gqa 1,2,4,7,10,22,25; done
  echo "gpu 1 at $SECONDS"
) > $OUT/pages.txt 2>&1 &
wait
cat $OUT/times.txt $OUT/pages.txt | cut -c1-900
