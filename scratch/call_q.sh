export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
tar xf scratch/pack.tar.xz -C scratch
C=$(PYTHONPATH=$R:$R/benchmarks python3 -c "import gpu_cubins; print(gpu_cubins.first_compiler())")
for f in $S/cubins/*.cubin; do b=$(basename $f); cp $f /tmp/c/${b%-nvcc-*}-$C.cubin; done
one() { [ $SECONDS -lt ${LIMIT:-260} ] || return; (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c NOGATE=${G:-1} timeout 120 python3 -W ignore $S/$2 $1 "${@:3}" 2>&1 | tail -3 | sed 's/,/ /g;s/ | /|/g'); }
for v in c0 c22 c11 c21 c32 c22n c0; do one $v rows.py cuda mla 0,1,3,4,5,6,7,9,10,12; done
echo "at $SECONDS"; ls /tmp/c | wc -l
