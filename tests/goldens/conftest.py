"""The golden runner is a script: its modules import each other by their plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
