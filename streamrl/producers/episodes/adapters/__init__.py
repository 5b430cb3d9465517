"""Environments and tools that were written for other packages, as episodes. Each package is an extra of streamrl."""
