"""Which package may import which, and what importing them must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "scheduler": {"scheduler"},
    "envs": {"envs"},
    "policies": {"policies"},
    "embodied_rl": {"embodied_rl", "scheduler", "envs", "policies"},
    "reasoning": {"reasoning", "scheduler", "embodied_rl"},
}


def imported(path: Path) -> set[str]:
    """The top-level packages of ours that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names & set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert imported(path) <= ALLOWED[package], path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import embodied_rl", ["mani_skill", "sapien", "transformers", "ray", "torch"]),
        ("import envs", ["mani_skill", "sapien", "ray", "torch", "gymnasium"]),
        ("import envs.pool", ["mani_skill", "sapien", "ray", "torch"]),
        ("import scheduler.placement", ["ray", "torch"]),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, absent: list[str]) -> None:
    code = f"import sys; {statement}; print([name for name in {absent} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
