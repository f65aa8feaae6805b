# dir file
nvcc -std=c++17 -O3 -arch=sm_90a -Xptxas=-v -DTREEATTN_TRAP_AFTER=3000000 -DTREEATTN_CANARY=1 -DTREEATTN_DELAY=1 -I$1 -cubin -o /tmp/can_$2.cubin $1/$2.cu 2>&1 | grep -E "spill|error" | awk -v n="$3 $2" '/error/{print} /spill/{if($5>0) s=s" "$5"/"$9} END{print n, s}'
