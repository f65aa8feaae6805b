# One GPU. Variants of variants_o.py, whose code is in the pack. About 170 s.
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
tar xf scratch/pack.tar.xz -C scratch
C=$(PYTHONPATH=$R:$R/benchmarks python3 -c "import gpu_cubins; print(gpu_cubins.first_compiler())")
for f in $S/cubins/*.cubin; do b=$(basename $f); cp $f /tmp/c/${b%-nvcc-*}-$C.cubin; done
one() { [ $SECONDS -lt ${LIMIT:-260} ] || return; (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c NOGATE=${G:-1} timeout 120 python3 -W ignore $S/$2 $1 "${@:3}" 2>&1 | tail -3 | sed 's/,/ /g;s/ | /|/g'); }
A=1,3,4,6,7,8,9,10,11,12,14,15,16,17,18,20,25
for v in v0 b4 b6f4 b6f3 b6f2 b5f3 b6f3h b4; do one $v rows.py cuda gqa $A; done
echo "at $SECONDS"
for v in v0 b4 b6f3; do one $v rows.py cuda ragged all; one $v rows.py cuda shapes 0,2,4,5,6,7,8; done
echo "at $SECONDS"
for v in v0 b6f4 b4 b5f3; do one $v rows.py cuda shapes 9,10; one $v rows.py cuda fp8 3,5,7,9,11,13; done
echo "at $SECONDS"; ls -la /tmp/c | wc -l
for v in v0 b4; do one $v rows.py cuda pages 0,8,9,16,17,18;  one $v rows.py cuda mla 0,2,3,5,6,8,9,12; done
echo "at $SECONDS"
