"""Code that is run by an interpreter of its own."""

import subprocess
import sys


def in_new_process(code: str) -> str:
    """What the code prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
