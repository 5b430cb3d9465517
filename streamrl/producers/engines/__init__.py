"""The engine that generates in a rollout worker's own process."""
