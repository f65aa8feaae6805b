export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch
mkdir -p /tmp/c; cp -r $S/c/. /tmp/c/
build() { (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait) }
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 150 python3 -W ignore $S/$3 "${@:4}" 2>&1 | tail -40) }
for v in v0 warm0 dry page2 s0 sfp sdry merge; do build $v attention_sm90_d128.cu mla_sm90.cu & done
wait; echo "built at $SECONDS"
(
  for v in v0 warm0 dry v0 warm0 dry; do NOGATE=1 one $v 0 rows.py $v cuda gqa 0,1,2,4,7,9,10,11,13,15,16; done
  for v in v0 warm0 v0 warm0; do NOGATE=1 one $v 0 rows.py $v cuda mla 0,1,3,4,6,9,10,12; done
  echo "gpu 0 at $SECONDS"
) > $OUT/times.txt 2>&1 &
(
  for v in s0 sfp sdry; do one $v 1 stamps2.py $v; done > $OUT/stamps.txt 2>&1
  for v in v0 page2; do one $v 1 pages1.py $v 0,1,2,3,4,5; done
  for d in 128 64 32; do export LEAST_DIMS=$d; NOGATE=1 one merge 1 rows.py dims$d triton gqa 0,1,2,3,4,5,7,8,10,21,22,23,25; done
  for d in 128 64; do export LEAST_DIMS=$d; NOGATE=1 one merge 1 rows.py dims$d cuda mla 0,1,2,3,4,6,7,9,12; done
  echo "gpu 1 at $SECONDS"
) > $OUT/pages.txt 2>&1 &
wait
cat $OUT/times.txt $OUT/pages.txt $OUT/stamps.txt | cut -c1-1200
