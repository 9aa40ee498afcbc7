#!/usr/bin/env bash
# Scaling of ranks on a machine with a GPU and 16 cores, in about seven minutes:
#   OUT=results bash benchmarks/ranks_device.sh
# Writes JSON to $OUT. PYTHON: another interpreter; DEVICE=cpu: without a GPU. COMMIT: of a tree without its history.
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
    for batch in 256 1024; do
        measure 60 --device cuda --wrapped --model ViT-B-32 --batch-size $batch --steps 20 \
            --json "$OUT/ranks_wrapped_gpu_$batch.json"
    done
else
    measure 60 --wrapped --model tiny --batch-size 8 --steps 3 --json "$OUT/ranks_wrapped_cpu.json"
fi
echo "wrapped: $((SECONDS - begin)) s"
for size in 2 4; do
    measure 60 --paired --ceiling --ranks $size --cores "$cores" --batch-size "${BATCH:-64}" --steps 4 --rounds 6 \
        --json "$OUT/ranks_paired_$size.json"
done
echo "tiny: $((SECONDS - begin)) s"
measure 150 --paired --ranks 2 --cores "$cores" --model "${LARGE:-ViT-B-32}" --batch-size 32 --steps 2 --rounds 4 \
    --json "$OUT/ranks_paired_vit.json"
echo "ViT-B-32: $((SECONDS - begin)) s"
