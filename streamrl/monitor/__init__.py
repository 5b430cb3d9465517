"""What people look at: a snapshot of the queues and the run's files, as tables, as one live screen, as lines."""
