#!/usr/bin/env bash
# Trains with one process per GPU on one machine. Run it again after an interruption: it goes on where the run stopped.
#
#   examples/torchrun.sh NAME PROCESSES --config alfworld.yaml [options of fit]
#
# On several machines, each needs the same command with --nnodes, --node-rank and --rdzv-endpoint in place of
# --standalone, --trainer.num_nodes, and the folder runs/ on a disk that all of them share.
set -euo pipefail

name=${1:?the name of the run is missing}
processes=${2:?the number of processes is missing}
shift 2

resume=()
if [ -d "runs/$name" ]; then
    resume=(--ckpt_path last)
fi
exec torchrun --standalone --nproc-per-node "$processes" -m gigpo_lightning \
    fit --trainer.default_root_dir="runs/$name" --trainer.devices="$processes" --trainer.strategy=ddp \
    "$@" "${resume[@]}"
