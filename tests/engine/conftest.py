"""Lets the engine's tests import `fake_runner`, which lies one folder up."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
