"""Rewards that are rules: no model and no network, one file per family.

Rules of microseconds run in the event loop (`instant`). What a response could make expensive, on purpose or not, runs
in processes that can be killed (`processed`).
"""
