"""Modules that run files of the tests name lie next to them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
