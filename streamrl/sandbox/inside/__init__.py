"""What runs in the keeper of a sandbox: a process without streamrl, with nothing but the standard library.

`sandbox.py` starts it as a package of its own (`inside`), so its modules import each other relatively and nothing else.
"""
