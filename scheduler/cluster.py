"""The machines a run uses: devices, worker processes and the channel hub. Ray owns the processes.

Devices are GPUs where there are any, else CPU slots (usable cores), numbered from 0 over all nodes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.channel import Channel, ChannelHub
from scheduler.placement import GroupPlacement
from scheduler.transport import Location
from scheduler.worker import Context, Handle, Worker, WorkerGroup, _Host, wait_all, with_rank

Kind = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Device:
    """One device: `local` is its number on its node (a GPU index, or a core)."""

    index: int
    kind: Kind
    node: str
    local: int


class Cluster:
    """A started (or joined) Ray cluster and the channels of one run.

    Args:
        address: Ray cluster to join; None starts Ray on this machine (RAY_ADDRESS is honoured).
        cpu_slots: CPU slots that count as devices; None: the usable cores. Slots may outnumber cores.
        timeout_s: bound of every wait for a worker.
        log_file: file that workers append their log to.
    """

    def __init__(
        self,
        address: str | None = None,
        cpu_slots: int | None = None,
        timeout_s: float = 600.0,
        log_file: str | None = None,
    ) -> None:
        import ray

        self.timeout_s, self.log_file = timeout_s, log_file
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            local: dict[str, Any] = {}
            if address is None and "RAY_ADDRESS" not in os.environ:
                local = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeID"]))
        self.devices = _devices(nodes, cpu_slots)
        self.kind: Kind = self.devices[0].kind
        self.host = here
        other_hosts = any(node["NodeID"] != here for node in nodes)
        address_here = next((node["NodeManagerAddress"] for node in nodes if node["NodeID"] == here), None)
        self.hub = ChannelHub(address_here if other_hosts else None)
        self.groups: list[WorkerGroup] = []

    def start(
        self, name: str, worker_class: type[Worker], placement: GroupPlacement, *args: Any, **kwargs: Any
    ) -> WorkerGroup:
        """Start one group and wait until every rank is constructed. Raises WorkerFailed."""
        group, handle = self.launch(name, worker_class, placement, *args, **kwargs)
        self.await_start([(group, handle)])
        return group

    def launch(
        self, name: str, worker_class: type[Worker], placement: GroupPlacement, *args: Any, **kwargs: Any
    ) -> tuple[WorkerGroup, Handle]:
        """Begin to start a group, so that several can start side by side; `await_start` completes it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        mailbox = self.channel(f"mail/{name}", capacity=4)
        context = Context(name, 0, len(placement.ranks), (), self.kind, (), self.host, mailbox, self.log_file)
        actors: list[Any] = []
        for rank, indices in enumerate(placement.ranks):
            devices = [self.devices[index] for index in indices]
            node = devices[0].node
            if any(device.node != node for device in devices):
                raise ValueError(f"{name}[{rank}] would span several nodes: devices {indices}")
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            own = with_rank(context, rank, tuple(indices), tuple(device.local for device in devices), node)
            named: Any = ray.remote(type(worker_class.__name__, (_Host,), {}))  # the name that `ps` shows
            actor_class = named.options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
            actors.append(actor_class.remote(worker_class, own, args, kwargs))
        group = WorkerGroup(name, worker_class, actors, self.hub.local_address)
        self.groups.append(group)
        return group, Handle(group, [actor.start.remote() for actor in actors])

    def await_start(self, launched: list[tuple[WorkerGroup, Handle]]) -> None:
        """Wait until the launched groups are constructed. Raises the first cause of a failure."""
        wait_all([handle for _, handle in launched], self.timeout_s)
        for group, handle in launched:
            group.locations = handle.result()

    def channel(
        self,
        name: str,
        capacity: int = 16,
        producers: WorkerGroup | None = None,
        consumers: WorkerGroup | None = None,
    ) -> Channel:
        """A channel between groups (None: the driver, or anyone). Knowing the consumers lets bytes move faster."""
        if consumers is not None:
            receivers = tuple(consumers.locations)
        else:
            receivers = (Location(self.host, -1),) if len({d.node for d in self.devices}) == 1 else ()
        return Channel(
            name,
            self.hub.local_address,
            self.hub.remote_address,
            self.host,
            capacity,
            producers.name if producers else "the driver",
            consumers.name if consumers else "the driver",
            receivers,
            self.timeout_s,
        )

    def shutdown(self) -> None:
        """End the workers, the hub and, if it was started here, Ray."""
        import ray

        for group in self.groups:
            for actor in group.actors:
                ray.kill(actor)
        self.hub.close()
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _devices(nodes: list[dict], cpu_slots: int | None) -> list[Device]:
    found: list[tuple[Kind, str, int]] = []
    for node in nodes:
        found += [("gpu", node["NodeID"], i) for i in range(int(node["Resources"].get("GPU", 0)))]
    if not found or cpu_slots is not None:
        cores = sorted(os.sched_getaffinity(0))
        found = []
        for position, node in enumerate(nodes):
            usable = cores if position == 0 else list(range(int(node["Resources"].get("CPU", 1))))
            count = cpu_slots if position == 0 and cpu_slots else len(usable)
            found += [("cpu", node["NodeID"], usable[i % len(usable)]) for i in range(count)]
    return [Device(index, kind, node, local) for index, (kind, node, local) in enumerate(found)]
