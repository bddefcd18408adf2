#!/usr/bin/env bash
# Start one run as two nodes of this machine, kill a rank, resume, export.
set -u
cd "$(dirname "$0")" || exit
run=$PWD/runs/two

node() {  # what you would type on node number $1
    zerofit launch run.yaml --no-ssh --nodes 2 --slots 1 --node-rank "$1" --master-addr 127.0.0.1
}

both() {  # node 1 in the background, node 0 here
    node 1 > node-1.log 2>&1 &
    node 0
    code=$?
    wait
    return $code
}

echo "== start; a rank is killed after step 50 =="
both &
first=$!
until [ -d "$run/checkpoints/step-00000050" ]; do
    kill -0 $first 2> /dev/null || { echo "the run ended too early"; exit 1; }
    sleep 0.2
done
kill -9 "$(pgrep -nf "zerofit.worker $run")"
wait $first
echo "== exit code $? =="

echo "== the same two commands resume =="
both || exit 1

echo "== export =="
zerofit ckpt export "$run" exported
