"""What the interpreter of an env server needs: the small set of packages, and nothing else that is installed here."""

import json
import subprocess
import sys
from pathlib import Path

PACKAGES = ["numpy", "zmq", "msgpack", "gymnasium"]
PROGRAM = f"""
import importlib.abc, importlib.util, json, pathlib, pkgutil, site, sys
allowed = {PACKAGES + ["cloudpickle", "farama_notifications", "typing_extensions", "envs"]}
installed = [pathlib.Path(folder) for folder in site.getsitepackages()]

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        here = any((folder / top).exists() or (folder / f"{{top}}.py").exists() for folder in installed)
        if here and top not in allowed:
            raise ImportError(f"{{name}} is not among the packages of a small environment")

sys.meta_path.insert(0, Blocker())
import envs
names = [module.name for module in pkgutil.iter_modules(envs.__path__, "envs.")]
modules = [name for name in names if name != "envs.put_on_plate"]  # it is part of ManiSkill's envs, and needs its torch
for module in modules:
    importlib.import_module(module)
print(json.dumps(modules))
"""


def test_the_modules_of_envs_import_with_the_small_set_of_packages() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {"envs.server", "envs.client", "envs.libero", "envs.maniskill", "envs.pool"} <= set(json.loads(done.stdout))
