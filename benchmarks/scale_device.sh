#!/bin/bash
# What docs/lab-scale.md and docs/benchmarks.md need from a machine with one GPU and 16 cores, in about nine minutes.
#
#     OUT=results bash benchmarks/scale_device.sh [PARTS]     # PARTS: decode end batch; default: all
#     BEFORE=checkout OUT=results bash benchmarks/scale_device.sh end     # beside another checkout, in turn
#
# Each part has a time limit, and prints what it measured; the files are written to $OUT. COMMIT: of a tree without its
# history. Ranks: ranks_device.sh.
set -u
OUT=${OUT:?a folder for the results}
PHOTOS=${PHOTOS:-/tmp/m1clip-photos}
PARTS=${*:-decode end batch}
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
  if [ -n "${BEFORE:-}" ]; then
    run 170 in_turn python benchmarks/end_to_end.py --device cuda --photos "$PHOTOS" --sides m1clip --before "$BEFORE" --rounds 2 --json "$OUT/end_to_end_in_turn.json"
  else
    run 130 end_to_end python benchmarks/end_to_end.py --device cuda --workers 16 --photos "$PHOTOS" --sides m1clip "m1clip, no cache" --json "$OUT/end_to_end.json"
  fi
  run 120 end_to_end_peer python benchmarks/end_to_end.py --device cuda --workers 16 --photos "$PHOTOS" --sides open_clip --json "$OUT/end_to_end_peer.json"
fi
if has batch; then
  run 100 batch python benchmarks/batch_default.py --photos "$PHOTOS" --json "$OUT/batch_default.json"
fi
