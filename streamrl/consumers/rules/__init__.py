"""Rules: no model and no network, one file per family.

Rules of microseconds run in the event loop (`instant`). Rules that a response could make expensive run in processes
that can be killed (`processed`). A rule gets its name for `use:` in `consumers.plugins.BUILT_IN`.
"""
