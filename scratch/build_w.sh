# lines of /tmp/list: variant source...
cd /work/main
one() { cd /work/main/scratch/v/$1; PYTHONPATH=/work/main/scratch/v/$1 TREEATTN_CACHE_DIR=/work/main/scratch/cubins /work/venv/bin/python -W ignore -c "
import sys
from treeattn.cuda.binary import compiled
print(sys.argv[1], compiled(sys.argv[2], (), 'nvcc').place)" $1 $2; }
export -f one
cat /tmp/list | xargs -P 2 -L 1 bash -c 'one $0 $1'
