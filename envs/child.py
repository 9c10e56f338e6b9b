"""How a program of this package is started as a child process, under any interpreter and in any working directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# The package comes by its own path: not its neighbours, which the interpreter may have in other versions, and nothing
# of its name in the working directory, which `-m` would look at first in Python 3.10.
PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import runpy
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("envs", sys.argv.pop(1))
sys.modules["envs"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["envs"])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def command(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """What runs a module of `envs` as `python -m` would, but for the search path."""
    package = Path(__file__).absolute().with_name("__init__.py")
    return [python, "-c", PROGRAM, str(package), module, *arguments]
