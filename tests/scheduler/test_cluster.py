"""Starting, joining and ending: what a run leaves behind however it ends, and workers on several nodes.

Drivers are scripts in processes of their own, so that they can be interrupted and killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from ends import wait_until
from probes import Probe

from scheduler.cluster import Cluster
from scheduler.placement import GroupPlacement, PlacementError
from scheduler.shared_memory import remove_orphans

HERE = str(Path(__file__).parent)
SOON = 120.0  # a bound for "does not hang" on a busy machine

DRIVER = """
import os, signal, sys, time
from dataclasses import dataclass
import numpy as np
from scheduler import cluster as clusters
from scheduler.cluster import Cluster
from scheduler.placement import GroupPlacement
from scheduler.worker import Worker, WorkerFailed
from probes import Probe

clusters.END_S = 60.0

@dataclass
class Message:
    array: np.ndarray

class Mine(Worker):
    def answer(self, source, target):
        message = source.get()
        assert type(message) is Message
        target.put(Message(message.array * 2))

def ready(cluster, group):
    channel = cluster.channel("arrays", producers=group)
    group.put_array(channel).wait(60)
    held = channel.get()
    channel.put(np.zeros(40000))
    print("ready", flush=True)
    return held

"""


def listen_to_interrupts() -> None:
    """Tests may themselves run in the background, where shells let Ctrl-C be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Driver:
    """A script that uses a cluster, in a process of its own."""

    def __init__(self, script: str, folder: Path) -> None:
        self.output = (folder / "output").open("w+")
        path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", DRIVER + script]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=listen_to_interrupts,
        )

    def text(self) -> str:
        return Path(self.output.name).read_text()

    def wait_ready(self) -> list[psutil.Process]:
        """Wait for the script's "ready"; returns its processes."""
        wait_until(lambda: "ready" in self.text() or self.process.poll() is not None, SOON)
        assert "ready" in self.text(), self.text()
        return psutil.Process(self.process.pid).children(recursive=True)

    def shared_memory(self, processes: list[psutil.Process]) -> list[str]:
        pids = [self.process.pid, *(process.pid for process in processes)]
        return [
            path.name for path in Path("/dev/shm").glob("embodied-rl-arena-*") if int(path.name.split("-")[3]) in pids
        ]


def alive(processes: list[psutil.Process]) -> dict[psutil.Process, str]:
    """Those that have not ended, and the names they have now."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ends while it is asked
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = process.name()
    return found


SCRIPTS = {
    "killed": """
cluster = Cluster(cpu_slots=2)
group = cluster.start("probe", Probe, GroupPlacement("probe", ((0,),)))
held = ready(cluster, group)
group.sleep(1000).wait()
""",
    "interrupted": """
with Cluster(cpu_slots=2) as cluster:
    group = cluster.start("probe", Probe, GroupPlacement("probe", ((0,), (1,))))
    held = ready(cluster, group)
    group.get(cluster.channel("never filled")).wait()
""",
    "plain": """
cluster = Cluster(cpu_slots=2)
mine = cluster.start("mine", Mine, GroupPlacement("mine", ((0,),)))
probe = cluster.start("probe", Probe, GroupPlacement("probe", ((1,),)))
source, target = cluster.channel("source", consumers=mine), cluster.channel("target", producers=mine)
handle = mine.answer(source, target)
source.put(Message(np.ones(40000)))
message = target.get(timeout=60)
assert type(message) is Message and (message.array == 2).all()
handle.wait(60)
ready(cluster, probe)
sys.stdin.read()
try:
    probe.end_process(after=0.2).wait(60)
except WorkerFailed as failure:
    print(str(failure).splitlines()[0])
time.sleep(1)
""",
}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Driver]]:
    """The scripts, running side by side."""
    drivers = {name: Driver(script, tmp_path_factory.mktemp(name)) for name, script in SCRIPTS.items()}
    yield drivers
    for driver in drivers.values():
        driver.process.kill()
        driver.process.wait(SOON)


def test_a_script_that_just_ends_leaves_nothing_and_prints_only_its_own(drivers: dict[str, Driver]) -> None:
    driver = drivers["plain"]
    processes = driver.wait_ready()
    driver.process.stdin.close()  # type: ignore[union-attr]
    assert driver.process.wait(SOON) == 0, driver.text()
    first_cause = "probe[0] died: its process ended (killed, out of memory or crashed)"
    assert driver.text().splitlines() == ["ready", first_cause]
    assert wait_until(lambda: not alive(processes), SOON), alive(processes)
    assert not driver.shared_memory(processes)


def test_an_interrupted_driver_leaves_nothing(drivers: dict[str, Driver]) -> None:
    driver = drivers["interrupted"]
    processes = driver.wait_ready()
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(SOON) != 0
    assert "KeyboardInterrupt" in driver.text()
    assert wait_until(lambda: not alive(processes), SOON), alive(processes)
    assert not driver.shared_memory(processes)


@pytest.mark.parametrize("moment", ["during", "after"])
def test_sigterm_is_handled_by_the_program_while_ray_starts_and_from_then_on(moment: str) -> None:
    script = f"""
import os, signal, threading, time
from scheduler.cluster import Cluster
import ray

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
if {moment == "during"}:
    start = ray.init
    def init(*args, **options):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        start(*args, **options)
    ray.init = init
try:
    with Cluster(cpu_slots=1):
        print("started", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    driver = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON)
    said = ["interrupted"] if moment == "during" else ["started", "interrupted"]
    assert (driver.returncode, driver.stdout.split()) == (0, said), driver.stderr


def test_a_killed_driver_takes_its_processes_along_and_its_memory_is_removed_by_the_next(
    drivers: dict[str, Driver],
) -> None:
    driver = drivers["killed"]
    processes = driver.wait_ready()
    assert any("Probe" in name for name in alive(processes).values())
    assert driver.shared_memory(processes)
    driver.process.kill()
    driver.process.wait(SOON)

    def others() -> dict[psutil.Process, str]:  # than the agents, Ray's own, which take a minute
        return {process: name for process, name in alive(processes).items() if not name.endswith("Agent")}

    assert wait_until(lambda: not others(), SOON), others()
    for agent in alive(processes):
        with suppress(psutil.NoSuchProcess):
            agent.kill()

    def is_removed() -> bool:  # by the next of any run on this machine, once what was killed is gone
        remove_orphans()
        return not driver.shared_memory(processes)

    assert wait_until(is_removed), driver.shared_memory(processes)


# ---------------------------------------------------------------------------------------------- several nodes


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, of one and of two cores, on this machine."""
    from ray.cluster_utils import Cluster as RayNodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
        nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        yield nodes.address
        nodes.shutdown()


@pytest.fixture(params=["argument", "environment"])
def joined(two_nodes: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster joined by its address, given either way."""
    if request.param == "environment":
        monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    with Cluster(two_nodes if request.param == "argument" else None, cpu_slots=1, timeout_s=SOON) as cluster:
        yield cluster


def by_node(cluster: Cluster) -> tuple[list[int], list[int]]:
    here = [device.index for device in cluster.devices if device.node == cluster.host]
    return here, [device.index for device in cluster.devices if device.node != cluster.host]


def test_workers_on_two_nodes_exchange_arrays(joined: Cluster) -> None:
    here, there = by_node(joined)
    assert (len(here), len(there)) == (1, 2)
    near = joined.start("near", Probe, GroupPlacement("near", ((here[0],),)))
    far = joined.start("far", Probe, GroupPlacement("far", tuple((index,) for index in there)))
    assert near.locations[0].host != far.locations[0].host
    source = joined.channel("source", consumers=far)
    middle = joined.channel("middle", producers=far, consumers=near)
    target = joined.channel("target", producers=near)
    handles = [far.scale(source, middle, 2), near.scale(middle, target, 3)]
    for i in range(6):
        source.put(np.full(100_000, i))
    source.close()
    got = [target.get() for _ in range(6)]
    assert sorted(int(array[0]) for array in got) == [6 * i for i in range(6)]
    assert all((array == array[0]).all() for array in got)
    handles[0].wait(SOON)
    middle.close()
    handles[1].wait(SOON)
    sent = np.arange(100_000)
    both = joined.start("probe", Probe, GroupPlacement("probe", ((here[0],), (there[0],))))
    for array in both.pass_on(sent).result(SOON):
        np.testing.assert_array_equal(array, sent)
    # On one machine the wrong way would work as well, so ask which it was.
    assert [way[:3] for way in near.ways().result(SOON) + far.ways().result(SOON)] == ["ipc", "tcp", "tcp"]
    assert near.blocks().result(SOON) + far.blocks().result(SOON) + both.blocks().result(SOON) == [0] * 5


def test_a_large_array_crosses_hosts_inside_the_message_and_the_trace_says_so(two_nodes: str) -> None:
    with Cluster(two_nodes, cpu_slots=1, timeout_s=SOON) as cluster:
        _, there = by_node(cluster)
        far = cluster.start("far", Probe, GroupPlacement("far", ((there[0],),)))
        source, target = cluster.channel("source", consumers=far), cluster.channel("target", producers=far)
        sent = np.arange(5_000_000)
        source.put(sent)
        source.close()
        far.scale(source, target, 2).wait(SOON)
        np.testing.assert_array_equal(target.get(), 2 * sent)
        events = {event.name: event.args for event in far.drain_trace().result(SOON)[0]}
        for name in ("wait for source", "put into target"):
            assert events[name]["transport"] == "inline"
            assert sent.nbytes < events[name]["bytes"] < sent.nbytes + 1000


def test_a_rank_cannot_span_nodes(two_nodes: str) -> None:
    with Cluster(two_nodes, timeout_s=SOON) as cluster:
        here, there = by_node(cluster)
        with pytest.raises(PlacementError, match=r"env\[0\] would span several nodes"):
            cluster.launch("env", Probe, GroupPlacement("env", ((here[0], there[0]),)))


def test_leaving_a_joined_cluster_ends_the_own_workers_only(two_nodes: str) -> None:
    import ray

    with Cluster(two_nodes, cpu_slots=1, timeout_s=SOON) as cluster:
        group = cluster.start("probe", Probe, GroupPlacement("probe", ((0,),)))
        (pid,) = group.pid().result(SOON)
    assert not ray.is_initialized()
    assert wait_until(lambda: not psutil.pid_exists(pid))
    with Cluster(two_nodes, cpu_slots=1, timeout_s=SOON) as cluster:
        assert len({device.node for device in cluster.devices}) == 2


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: "),
        ("ray://127.0.0.1:1", "no Ray cluster at ray://127.0.0.1:1: "),
        ("nonsense", "Ray did not join the cluster at nonsense: "),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, says: str) -> None:
    script = (
        "from scheduler.cluster import Cluster, RayFailed\n"
        f"try: Cluster({address!r})\n"
        "except RayFailed as error: print(error)"
    )
    driver = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON)
    assert driver.returncode == 0 and driver.stdout.startswith(says), driver.stderr
