"""Runtime: what runs a role as a process, and the supervisor that runs a whole run on one machine."""
