"""The learner: takes complete groups, trains the policy with FSDP, checkpoints and publishes versions."""
