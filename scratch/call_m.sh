# One GPU. Variants of variants_m.py, whose code is in scratch/cubins. About 150 s.
export PYTHONUNBUFFERED=1
R=$PWD; S=$R/scratch; mkdir -p /tmp/c
C=$(PYTHONPATH=$R:$R/benchmarks python3 -c "import gpu_cubins; print(gpu_cubins.first_compiler())")
for f in $S/cubins/*.cubin; do b=$(basename $f); cp $f /tmp/c/${b%-nvcc-*}-$C.cubin; done
one() { (cd $S/v/$1; PYTHONPATH=$PWD TREEATTN_CACHE_DIR=/tmp/c NOGATE=${G:-1} timeout 120 python3 -W ignore $S/$2 $1 "${@:3}" 2>&1 | tail -3); }
A=0,1,3,4,6,7,8,9,10,12,15,16,18,25
[ $SECONDS -lt 400 ] && one v0 rows.py cuda gqa $A
for v in h22 h33 s2 s3 s4 elast efirst p2 p0 elast_p2 nocopy nosoft v0 cpo cpo_s2 cpo_s3 cpo_s4 cpo_elast cpo_efirst cpo_p0 cpo_p2 cpo_box cpo_box_p2 v0; do
  [ $SECONDS -lt ${LIMIT:-260} ] && one $v rows.py cuda gqa $A; done
echo "at $SECONDS"
for v in v0 elast p2 efirst; do [ $SECONDS -lt ${LIMIT:-260} ] && one $v rows.py cuda mla 0,3,6,9,12; done
echo "at $SECONDS"; ls -la /tmp/c | wc -l; nvidia-smi --query-gpu=uuid --format=csv
