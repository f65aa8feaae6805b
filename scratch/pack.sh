# Fills scratch/ of the checkout that a GPU call is made from: bash scratch/pack.sh (in a worktree of wip/experiments), with the branches beside it
S=$(cd "$(dirname "$0")" && pwd); D=${1:-/work/main}/scratch; rm -rf "$D"; mkdir -p "$D/v"
cp "$S"/{call_a.sh,rows.py,pages1.py,stamps.py,prof1.py,hot.py,racepatterns.cu} "$D"
take() { mkdir -p "$D/v/$1"; git -C "$S/.." archive "$2" treeattn csrc | tar -x -C "$D/v/$1"; }
take v0 main; take fp wip/first-pages; take firstq wip/mla-first-q; take warm wip/warm; take page1 wip/page-1
for v in v1 v2 v5 stamp merge; do take $v main; (cd "$D/v/$v" && patch -s -p1 < "$S/$v.patch"); done
du -sh "$D"
