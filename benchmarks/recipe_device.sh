#!/bin/bash
# What docs/recipe.md needs from a machine with one GPU and 16 cores: runs of m1clip, trials of changes and open_clip.
#
#     DATA=flickr8k-112 OUT=results bash benchmarks/recipe_device.sh 250 changes
#     DATA=coco-112 OUT=results bash benchmarks/recipe_device.sh 200 members
#
# Arguments: seconds, and a list of jobs in more_time.py. TRIALS: seeds of recipe_trials.py, which run
# beside them. PEER_SOURCE: a folder with open_clip and timm, whose runs begin after PEER_DELAY
# seconds. test.json holds scores of the test split: read it when nothing is left to choose.
set -u
DATA=${DATA:?a folder with train, val and test splits}
OUT=${OUT:?a folder for the results}
LIMIT=$1 JOBS=$2
HERE=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
mkdir -p "$OUT"
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d && sleep 1
python3 -c "import torch; torch.ones(4, device='cuda').sum().item()" || unset CUDA_MPS_PIPE_DIRECTORY
SECONDS=0
timeout $((LIMIT + 30)) python3 "$HERE/more_time.py" "$DATA" --json "$OUT/more_time.json" \
  --jobs "$JOBS" --test "$OUT/test.json" \
  --processes "${PROCESSES:-10}" --seconds "$LIMIT" >"$OUT/more_time.log" 2>&1 &
if [ "${TRIALS:-0}" -gt 0 ]; then
  python3 "$HERE/recipe_trials.py" /tmp/queue.json --seeds "$TRIALS" &&
    python3 "$HERE/recipe_study.py" pack "$DATA" /tmp/study-data.pt --splits train val &&
    timeout "$LIMIT" python3 "$HERE/recipe_study.py" run /tmp/study-data.pt /tmp/queue.json "$OUT" \
      --processes 5 --seconds $((LIMIT - 10 - SECONDS)) >"$OUT/trials.log" 2>&1
  python3 "$HERE/recipe_trials.py" --show "$OUT/runs.jsonl" | tee "$OUT/trials.txt"
fi
if [ -n "${PEER_SOURCE:-}" ]; then
  python3 -c "import sys; sys.path.insert(0, '$HERE'); from pathlib import Path; import speedrun; speedrun.write_splits('$DATA', Path('/tmp'))"
  sleep $((${PEER_DELAY:-0} - SECONDS))
  (cd "$HERE/peers" && PYTHONPATH=$PEER_SOURCE timeout $((LIMIT + 10 - SECONDS)) python3 open_clip_budget.py /tmp/data.jsonl \
    --json "$OUT/open_clip_budget.json" --seconds $((LIMIT - SECONDS)) --processes "${PEER_PROCESSES:-6}") >"$OUT/open_clip.log" 2>&1
  tail -6 "$OUT/open_clip.log"
fi
wait
tail -25 "$OUT/more_time.log"
echo "$SECONDS s"
