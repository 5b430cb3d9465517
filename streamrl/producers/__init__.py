"""What writes into the queues: the feeder, which admits prompts, and the rollout replicas, which answer them."""
