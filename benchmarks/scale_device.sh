#!/bin/bash
# What docs/scale.md and docs/benchmarks.md need from a machine with one GPU and 16 cores, in about nine minutes.
#
#     OUT=results bash benchmarks/scale_device.sh [PARTS]     # PARTS: decode end ranks cuda batch; default: all
#
# Each part has a time limit, and prints what it found; the files are written to $OUT.
set -u
OUT=${OUT:?a folder for the results}
PHOTOS=${PHOTOS:-/tmp/m1clip-photos}
PARTS=${*:-decode end ranks cuda batch}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PEERS=${PEERS:-$(command -v python)} PEER_SOURCE=${PEER_SOURCE:-$PYTHONPATH}
unset OMP_NUM_THREADS
run() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  local begin=$SECONDS
  timeout "$limit" "$@" 2>"$OUT/$name.err" || echo "$name: exit code $?: $(tail -c 600 "$OUT/$name.err")"
  echo "   ($((SECONDS - begin)) s)"
}
lscpu 2>/dev/null | grep -E "Thread|Core|L2|L3|NUMA"
has() { [[ " $PARTS " == *" $1 "* ]]; }
if has decode || has end || has batch; then
  run 60 photos python -c "import sys; sys.path.insert(0, 'benchmarks'); from pathlib import Path; from photo_set import write_set; write_set(Path('$PHOTOS'), 24000)"
fi
if has decode; then
  run 110 decoding python benchmarks/decoding.py --images 24000 --photos "$PHOTOS" --workers 16 --json "$OUT/decoding.json"
fi
if has end; then
  run 130 end_to_end python benchmarks/end_to_end.py --device cuda --workers 16 --photos "$PHOTOS" --sides m1clip "m1clip, no cache" --json "$OUT/end_to_end.json"
  run 120 end_to_end_peer python benchmarks/end_to_end.py --device cuda --workers 16 --photos "$PHOTOS" --sides open_clip --json "$OUT/end_to_end_peer.json"
fi
if has cuda; then
  run 70 ranks_cuda python benchmarks/ranks.py --device cuda --ranks 1 --model ViT-B-32 --batch-size 256 --steps 8 --rounds 1 --wrapped --json "$OUT/ranks_cuda.json"
fi
if has ranks; then
  run 75 ranks_tiny python benchmarks/ranks.py --ranks 1 2 4 --cores 4 --model tiny --batch-size 64 --steps 6 --rounds 1 --trace "$OUT/trace.json" --json "$OUT/ranks_tiny.json"
  run 45 independent python benchmarks/ranks.py --independent --ranks 1 4 --cores 4 --model tiny --batch-size 64 --steps 6 --rounds 1 --json "$OUT/ranks_independent.json"
  run 75 ranks_vit python benchmarks/ranks.py --ranks 1 2 4 --cores 4 --model ViT-B-32 --batch-size 16 --steps 4 --rounds 1 --json "$OUT/ranks_vit.json"
fi
if has batch; then
  run 100 batch python benchmarks/batch_default.py --photos "$PHOTOS" --json "$OUT/batch_default.json"
fi
