# Merges of MLA in other shapes, MLA's code moved by instructions, two row tiles again, a million tokens: two GPUs
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
build() { (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait) }
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 timeout 100 python3 -W ignore $S/$3 "${@:4}" 2>&1 | tail -40) }
for v in v0 fin nop1 nop2 nop3 nop5 nop7 nop11; do build $v mla_sm90.cu & done; build v0 attention_sm90_d128.cu & wait; echo "built at $SECONDS"
(
  for f in 4,128,1 2,128,1 1,128,1 8,128,1 4,256,1 2,256,1 4,256,2 2,512,4 4,512,4 8,512,4; do FIN=$f NOGATE=1 one fin 0 rows.py fin$f cuda mla 0,3,4,9,10,12; done
  FIN=4,512,4 FIN_ELEMENTS=16384 one fin 0 rows.py fin4,512,4e cuda mla 3,9
  echo "gpu 0 at $SECONDS"
) > $OUT/finish.txt 2>&1 &
(
  for v in v0 nop1 nop2 nop3 nop5 nop7 nop11 v0; do NOGATE=1 one $v 1 rows.py $v cuda mla 4,6,9,12; done
  for i in 1 2; do NOGATE=1 one v0 1 rows.py two-tiles cuda ragged all; NOGATE=1 one v0 1 rows.py two-tiles cuda shapes all; done
  (cd $R; PYTHONPATH=$R TREEATTN_CACHE_DIR=/tmp/c/v0 CUDA_VISIBLE_DEVICES=1 timeout 120 python3 -m pytest -q -x tests/gpu/test_cuda_gpu.py -k million -p no:cacheprovider 2>&1 | tail -5)
  echo "gpu 1 at $SECONDS"
) > $OUT/moved.txt 2>&1 &
wait; cat $OUT/finish.txt $OUT/moved.txt | cut -c1-700
