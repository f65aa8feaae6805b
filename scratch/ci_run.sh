cd /work/tmp
mv /work/venv /work/venv.away; mv /tmp/triton36 /tmp/triton36.away
cd /work/tmp/ci
start=$(date +%s)
env -u TRITON_INTERPRET CI=true bash .ci/run > /work/tmp/ci.log 2>&1 < /dev/null
echo "rc $? after $(( $(date +%s) - start )) s" > /work/tmp/ci.done
mv /work/venv.away /work/venv; mv /tmp/triton36.away /tmp/triton36
