"""What runs in processes of their own, within limits of the kernel: scripts that import nothing of streamrl.

`child` is the process, the other modules are functions for it (`prepare`). `streamrl.consumers.processes` starts and
kills the processes.
"""
