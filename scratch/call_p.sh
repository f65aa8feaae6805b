export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
tar xf scratch/pack.tar.xz -C scratch
C=$(PYTHONPATH=$R:$R/benchmarks python3 -c "import gpu_cubins; print(gpu_cubins.first_compiler())")
for f in $S/cubins/*.cubin; do b=$(basename $f); cp $f /tmp/c/${b%-nvcc-*}-$C.cubin; done
one() { [ $SECONDS -lt ${LIMIT:-260} ] || return; (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c NOGATE=${G:-1} timeout 120 python3 -W ignore $S/$2 $1 "${@:3}" 2>&1 | tail -3 | sed 's/,/ /g;s/ | /|/g'); }
for v in f64 f96 f64n; do one $v rows.py cuda gqa 3,6,9,12,14,15,16,17,20; done
for v in v0 f64 f128; do one $v rows.py cuda shapes 9,10;  one $v rows.py cuda fp8 1,3,5,7,9,11,13; done
for v in v0 f64; do G= one $v rows.py cuda pages 1,9,17;  G= one $v rows.py cuda mla 0,3,7,9,12; done
echo "at $SECONDS"; ls /tmp/c | wc -l
