#!/bin/sh
# Written by gpushare: TaskProlog of slurmd. Tells each task of an MPS job where its daemon listens.
# The daemon renumbers its one GPU, so the task names it by UUID too.
[ -r "@{STATE}/job-${SLURM_JOB_ID:-}" ] || exit 0
# A step without a share of MPS keeps the GPU or shard that Slurm gave it.
[ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ] || exit 0
read -r uuid shards <"@{STATE}/job-$SLURM_JOB_ID"
if [ "$uuid" = - ]; then
    echo "print gpushare: Slurm does not say which GPU has this job's share of MPS, so it runs without it; put mps last: --gres=shard:1,mps:10"
    echo "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    # By Slurm's number it could be the GPU with MPS: that counts the devices of one gres.
    [ -z "$shards" ] || echo "export CUDA_VISIBLE_DEVICES=$shards"
    exit 0
fi
if [ -n "${SLURM_SHARDS_ON_NODE:-}" ]; then
    # A program is a client of MPS or not: it cannot use both. Slurm refuses typed gres (shard:t4:1) in steps.
    echo "print gpushare: this step has a share of MPS and a shard, and its tasks use the share of MPS; for the shard: srun --gres=shard:1"
    [ -z "$shards" ] || echo "export GPUSHARE_SHARD_DEVICES=$shards"
fi
echo "export CUDA_MPS_PIPE_DIRECTORY=@{STATE}/$uuid/pipe"
echo "export CUDA_VISIBLE_DEVICES=$uuid"
