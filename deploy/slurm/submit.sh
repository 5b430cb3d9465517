#!/usr/bin/env bash
# Checks the run, and submits its jobs. A repeat after the end goes on with the run.
set -euo pipefail
cd "$(dirname "$0")"
queued=$(squeue --me --noheader --format=%i --name=streamrl-sample-learner,streamrl-sample-engine,streamrl-sample-rollout,streamrl-sample-reward,streamrl-sample-feeder)
if [ -n "$queued" ]; then
    echo "error: jobs of this run are queued already: squeue --me --name=streamrl-sample-learner,streamrl-sample-engine,streamrl-sample-rollout,streamrl-sample-reward,streamrl-sample-feeder" >&2
    exit 78
fi
streamrl up ../run.yaml --run ../../runs/sample --prepare --set weights.transport=http --set weights.host=0.0.0.0 --set engine.host=0.0.0.0 --set redis.url=rediss://queue.example:6379/0
rm -rf ../../runs/sample/slurm
mkdir ../../runs/sample/slurm
sbatch --parsable learner.sbatch
sbatch --parsable engine.sbatch
sbatch --parsable rollout.sbatch
sbatch --parsable reward.sbatch
sbatch --parsable feeder.sbatch
echo "streamrl status --run $(realpath ../../runs/sample)   shows the roles"
echo 'scancel --me --name=streamrl-sample-learner,streamrl-sample-engine,streamrl-sample-rollout,streamrl-sample-reward,streamrl-sample-feeder   ends them'
