"""Where the processes of a run are placed: on this machine, or by a cluster."""
