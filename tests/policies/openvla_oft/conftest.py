"""The golden data and the golden model of OpenVLA are OFT's too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "openvla"))
