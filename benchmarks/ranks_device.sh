#!/usr/bin/env bash
# Scaling of ranks on a machine with a GPU and 16 cores, in about four minutes:
#   OUT=results bash benchmarks/ranks_device.sh
# Writes JSON, traces and profiles to $OUT. PYTHON: another interpreter; DEVICE=cpu: without a GPU.
set -uo pipefail
python=${PYTHON:-python}
device=${DEVICE:-cuda}
cores=${CORES:-4}
mkdir -p "$OUT"
measure() { timeout "$1" "$python" benchmarks/ranks.py "${@:2}" || echo "failed: ${*:2}"; }

begin=$SECONDS
if [ "$device" = cuda ]; then
    measure 70 --device cuda --wrapped --model ViT-B-32 --batch-size 256 --steps 20 \
        --profile "$OUT/profile" --json "$OUT/ranks_wrapped_gpu.json"
else
    measure 70 --wrapped --model tiny --batch-size 8 --steps 3 \
        --profile "$OUT/profile" --json "$OUT/ranks_wrapped_cpu.json"
fi
echo "wrapped: $((SECONDS - begin)) s"
measure 170 --ranks 1 2 4 --cores "$cores" --batch-size "${BATCH:-64}" --steps 8 --rounds 2 \
    --gloo --ceiling --json "$OUT/ranks_16_cores.json"
echo "tiny: $((SECONDS - begin)) s"
measure 80 --ranks 1 2 --cores "$cores" --model "${LARGE:-ViT-B-32}" --batch-size 32 --steps 3 \
    --rounds 1 --gloo --trace "$OUT/trace.json" --json "$OUT/ranks_vit.json"
gzip -f "$OUT/trace.json"
echo "ViT-B-32: $((SECONDS - begin)) s"
