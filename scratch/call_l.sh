# How K and V come from memory: fewer stages, L2 hints, L2 promotion. Rows that memory limits, and rows of several row tiles.
# Before: cp scratch/{rows.py,call_l.sh} to /work/main/scratch, python3 scratch/variants_l.py. Two GPUs, about 150 s.
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
build() { (cd $S/v/$1; export PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1; mkdir -p $TREEATTN_CACHE_DIR
   for f in "${@:2}"; do python3 -c "from treeattn.cuda.binary import compiled; compiled('$f', (), 'nvcc')" & done; wait) }
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c/$1 CUDA_VISIBLE_DEVICES=$2 NOGATE=1 timeout 120 python3 -W ignore $S/$3 $1 "${@:4}" 2>&1 | tail -5) }
V="v0 s3 s4 s5 efirst elast p0 p2 efirst_p2"
for v in $V; do build $v attention_sm90_d128.cu mla_sm90.cu & done; wait; echo "built at $SECONDS"
( for v in $V v0; do one $v 0 rows.py cuda gqa 0,3,6,9,12,15,16,17,8,18,20; done; echo "gpu 0 at $SECONDS" ) > $OUT/l0.txt 2>&1 &
( for v in v0 p0 p2 efirst elast efirst_p2 v0; do one $v 1 rows.py cuda mla 0,3,6,9,12; one $v 1 rows.py cuda ragged 0,2,3,6,7; done; echo "gpu 1 at $SECONDS" ) > $OUT/l1.txt 2>&1 &
wait; cat $OUT/l0.txt $OUT/l1.txt | cut -c1-900
