#!/usr/bin/env bash
# CPU against CUDA for six sizes, two precisions and batches 1 to 1024; all ways of one job on the card. Two calls:
# each writes its own folder. Usage: benchmarks/h200_compare.sh sweep|focus FOLDER [PYTHON] [MINUTES]
# comparison.json is written after every candidate, so a run that is cut off leaves what it has.
# docs/results/h200 is from `sweep` with 5.2 minutes, its folder focus from `focus` with 2.1: what had no time in them is
# listed in the report with its reason.
set -euo pipefail
what=${1:?sweep or focus}
out=${2:?folder for the results}
python=${3:-python3}
case $what in
  sweep)
    "$python" -m m1clip compare --sizes tiny,small,ViT-B-32,200M,500M,1B --batch 1,4,16,64,256,1024 \
      --devices cpu,cuda --precisions fp32,bf16 --optimizer adamw --minutes "${4:-7}" --out "$out/sweep" ;;
  focus)
    "$python" -m m1clip compare --model ViT-B-32 --batch 64 --devices cuda --precisions bf16 --optimizer adamw \
      --minutes "${4:-4}" --out "$out/focus" ;;
  *) echo "sweep or focus, not $what" >&2; exit 2 ;;
esac
