#!/bin/bash
# What docs/recipe.md needs from a machine with one GPU and 16 cores: m1clip's runs, and trials of changes beside them.
#
#     DATA=flickr8k-112 OUT=results bash benchmarks/recipe_device.sh 270 mirror 5         # Flickr8k
#     DATA=coco-112 OUT=results bash benchmarks/recipe_device.sh 200 members 3 --no-pairs   # COCO
#
# Arguments: seconds, a list of jobs in more_time.py, seeds of the trials, and options of
# recipe_trials.py. test.json holds scores of the test split: read it when nothing is left to choose.
set -u
DATA=${DATA:?a folder with train, val and test splits}
OUT=${OUT:?a folder for the results}
SECONDS_IN_ALL=$1 JOBS=$2 SEEDS=$3
shift 3
HERE=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
mkdir -p "$OUT"
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d && sleep 1
python3 -c "import torch; torch.ones(4, device='cuda').sum().item()" || unset CUDA_MPS_PIPE_DIRECTORY
SECONDS=0
timeout $((SECONDS_IN_ALL + 45)) python3 "$HERE/more_time.py" "$DATA" --json "$OUT/more_time.json" \
  --jobs "$JOBS" --test "$OUT/test.json" \
  --processes "${PROCESSES:-10}" --seconds $((SECONDS_IN_ALL - 5)) >"$OUT/more_time.log" 2>&1 &
RUNS=$!
python3 "$HERE/recipe_trials.py" /tmp/queue.json --seeds "$SEEDS" "$@" &&
  python3 "$HERE/recipe_study.py" pack "$DATA" /tmp/study-data.pt --splits train val &&
  timeout $((SECONDS_IN_ALL + 20)) python3 "$HERE/recipe_study.py" run /tmp/study-data.pt /tmp/queue.json "$OUT" \
    --processes "${TRIAL_PROCESSES:-5}" --seconds $((SECONDS_IN_ALL - 10 - SECONDS)) >"$OUT/trials.log" 2>&1
tail -3 "$OUT/trials.log"
python3 "$HERE/recipe_trials.py" --show "$OUT/runs.jsonl" | tee "$OUT/trials.txt"
wait "$RUNS"
tail -25 "$OUT/more_time.log"
echo "$SECONDS s"
