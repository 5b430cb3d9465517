"""`python -m streamrl.runtime KIND INDEX RUN_DIR`: what the supervisor executes for each process of a run.

KIND is that of a role; of a server of a reward model it is `reward_model.NAME`.
"""

import sys
from pathlib import Path

from streamrl.errors import ExitCode
from streamrl.runtime.roles import KINDS, run

if len(sys.argv) != 4 or sys.argv[1].partition(".")[0] not in KINDS or not sys.argv[2].isdecimal():
    sys.stderr.write(f"usage: python -m streamrl.runtime {{{','.join(KINDS)}}} INDEX RUN_DIR\n")
    sys.exit(ExitCode.USAGE)
run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
