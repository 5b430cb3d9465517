"""What streamrl puts inside the process of an engine server.

These modules import nothing of streamrl and no third-party package but torch, safetensors and, where it is installed,
xxhash: they run in the server's own environment, found through PYTHONPATH.
"""
