# One GPU. Variants of variants_n.py, whose code is in the pack. About 200 s.
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
tar xf scratch/pack.tar.xz -C scratch
C=$(PYTHONPATH=$R:$R/benchmarks python3 -c "import gpu_cubins; print(gpu_cubins.first_compiler())")
for f in $S/cubins/*.cubin; do b=$(basename $f); cp $f /tmp/c/${b%-nvcc-*}-$C.cubin; done
one() { [ $SECONDS -lt ${LIMIT:-260} ] || return; (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c NOGATE=${G:-1} timeout 120 python3 -W ignore $S/$2 $1 "${@:3}" 2>&1 | tail -3 | sed 's/,/ /g;s/ | /|/g'); }
A=0,1,3,4,6,7,8,9,10,12,14,15,16,17,18,20,25
for v in v0 a6 a5 a4 a3 a4p0 n4 u4 a4h a4l v0; do one $v rows.py cuda gqa $A; done
echo "at $SECONDS"
for v in v0 a6 u4; do one $v rows.py cuda mla all;  one $v rows.py cuda fp8 all; done
echo "at $SECONDS"
for v in v0 a6 a4 a3; do one $v rows.py cuda ragged all; one $v rows.py cuda shapes all; done
echo "at $SECONDS"
for v in v0 a6; do one $v rows.py cuda pages 0,8,9,16,17,18; done
echo "at $SECONDS"; ls -la /tmp/c | wc -l
