"""What `import envs` costs."""

import subprocess
import sys


def test_importing_envs_loads_no_torch_ray_or_simulator() -> None:
    heavy = ["torch", "ray", "sapien", "mani_skill", "gymnasium"]
    program = f"import sys, envs, envs.pool, envs.slots; print([m for m in {heavy} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
