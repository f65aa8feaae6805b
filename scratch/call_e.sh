# wip/next beside main; merges of MLA in other shapes; MLA's code moved by instructions; two row tiles: what DRAM reads; a million tokens
# Before: cp scratch/{rows.py,pages1.py} and call_e.sh to /work/main/scratch, python3 scratch/variants_e.py. Two GPUs, about 250 s.
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
build() { (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait) }
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 120 python3 -W ignore $S/$3 "${@:4}" 2>&1 | tail -40) }
for v in v0 fin nop1 nop2 nop3 nop5 nop7 nop11; do build $v mla_sm90.cu & done; for v in v0 next; do build $v attention_sm90_d128.cu fp8_sm90_d128.cu & done; wait; echo "built at $SECONDS"
(
  one next 0 rows.py next cuda gqa all
  for v in v0 next; do NOGATE=1 one $v 0 rows.py $v cuda gqa all; NOGATE=1 one $v 0 rows.py $v cuda fp8 0,1,4,5,10,11; done
  for f in 4,128,1 2,128,1 1,128,1 8,128,1 4,256,1 4,256,2 4,512,4 8,512,4; do FIN=$f NOGATE=1 one fin 0 rows.py fin$f cuda mla 0,3,9,12; done
  echo "gpu 0 at $SECONDS"
) > $OUT/next.txt 2>&1 &
(
  for i in 1 2; do NOGATE=1 one v0 1 rows.py two-tiles cuda ragged all; NOGATE=1 one v0 1 rows.py two-tiles cuda shapes all; done
  (cd $S/v/v0; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/v0 CUDA_VISIBLE_DEVICES=1 timeout 60 ncu --clock-control none --cache-control all -k regex:_sm90_ --csv \
     --metrics gpu__time_duration.sum,dram__bytes_read.sum,lts__t_sectors_op_read.sum python3 -W ignore benchmarks/profile_rows.py ragged 2>&1 | tail -30)
  for v in v0 nop1 nop2 nop3 nop5 nop7 nop11; do NOGATE=1 one $v 1 rows.py $v cuda mla 6,9; done
  (cd $S/v/next; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/next CUDA_VISIBLE_DEVICES=1 timeout 120 python3 -m pytest -q -x tests/gpu/test_cuda_gpu.py -k "million or again" -p no:cacheprovider 2>&1 | tail -5)
  echo "gpu 1 at $SECONDS"
) > $OUT/moved.txt 2>&1 &
wait; cat $OUT/next.txt $OUT/moved.txt | cut -c1-900
