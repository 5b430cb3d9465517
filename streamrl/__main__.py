"""The command line as a program: `streamrl`, or `python -m streamrl`.

Ctrl-C while its modules load ends it at once, without a traceback: there is nothing to clean up.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130  # ExitCode.INTERRUPTED, which is not loaded yet


def main() -> None:
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under `nohup` and the like
    if heeded:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from streamrl import cli

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
