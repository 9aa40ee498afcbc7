#!/usr/bin/env bash
# Scaling of ranks on a machine with a GPU and 16 cores, in about three minutes:
#   OUT=results bash benchmarks/ranks_device.sh
# Writes JSON and a trace to $OUT. PYTHON: another interpreter; DEVICE=cpu: without a GPU.
set -uo pipefail
python=${PYTHON:-python}
device=${DEVICE:-cuda}
cores=${CORES:-4}
mkdir -p "$OUT"
measure() { timeout "$1" "$python" benchmarks/ranks.py "${@:2}" || echo "failed: ${*:2}"; }

begin=$SECONDS
lscpu >"$OUT/cpu.txt"
lscpu -e >>"$OUT/cpu.txt"
measure 60 --limits --ranks 1 2 4 --cores "$cores" --json "$OUT/ranks_limits.json"
if [ "$device" = cuda ]; then
    measure 60 --device cuda --wrapped --model ViT-B-32 --batch-size 256 --steps 20 \
        --json "$OUT/ranks_wrapped_gpu.json"
else
    measure 60 --wrapped --model tiny --batch-size 8 --steps 3 --json "$OUT/ranks_wrapped_cpu.json"
fi
echo "wrapped: $((SECONDS - begin)) s"
measure 80 --ranks 1 2 --cores "$cores" --model "${LARGE:-ViT-B-32}" --batch-size 32 --steps 3 \
    --rounds 1 --ceiling --trace "$OUT/trace.json" --json "$OUT/ranks_vit.json"
gzip -f "$OUT/trace.json"
echo "ViT-B-32: $((SECONDS - begin)) s"
measure 170 --ranks 1 2 4 --cores "$cores" --batch-size "${BATCH:-64}" --steps 12 --rounds 2 \
    --ceiling --json "$OUT/ranks_16_cores.json"
echo "tiny: $((SECONDS - begin)) s"
