"""The HTTP door of episodes: a server that speaks the APIs that agents know, with one secret for each sample."""
