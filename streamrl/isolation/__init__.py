"""Processes and their ends, with the standard library alone: its files also run as scripts, in any interpreter."""
