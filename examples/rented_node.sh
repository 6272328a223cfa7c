#!/usr/bin/env bash
# Trains in a container on a rented machine with NVIDIA GPUs. Run it again after an interruption: it goes on where the
# run stopped, and does nothing once the run is finished.
#
#   examples/rented_node.sh NAME --config alfworld.yaml [options of fit]
#
#   IMAGE=gigpo-lightning   the image to run, built from this checkout if it is not there
#   STORE=$HOME/gigpo       a folder on a disk that outlives the machine: runs, downloaded models and games
set -euo pipefail

name=${1:?the name of the run is missing}
shift
image=${IMAGE:-gigpo-lightning}
store=${STORE:-$HOME/gigpo}

mkdir -p "$store/runs" "$store/cache" "$store/data"
if ! docker image inspect "$image" > /dev/null 2>&1; then
    docker build --tag "$image" "$(dirname "$0")/.."
fi
# --init forwards signals and collects processes that end; GPUs that train together meet in shared memory.
options=(--rm --init --gpus all --shm-size 1g --user "$(id -u):$(id -g)"
    --volume "$store/runs:/workspace/runs" --volume "$store/cache:/cache" --volume "$store/data:/data:ro")
docker run "${options[@]}" "$image" check

if [ -e "$store/runs/$name/results.json" ]; then
    echo "$name is finished: $store/runs/$name/results.json"
    exit 0
fi
resume=()
if [ -d "$store/runs/$name" ]; then
    resume=(--ckpt_path last)
fi
exec docker run "${options[@]}" --name "gigpo-$name" "$image" \
    fit --trainer.default_root_dir="runs/$name" "$@" "${resume[@]}"
