"""Make what the look demo starts from, in `cache/` beside this file, once; `--force` makes it again."""

import sys
from pathlib import Path

from streamrl.demo.prepare import main

sys.exit(main([str(Path(__file__).parent), "--task", "look", *sys.argv[1:]]))
