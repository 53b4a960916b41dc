"""Who takes part: TF_CONFIG, and whether the peers are there.

Comes in: TF_CONFIG, or a number of local workers. Goes out: a `Cluster` whose peers answer.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

from tfpipe.errors import ClusterError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The workers' addresses in order, and which of them this process is."""

    addresses: tuple[str, ...]
    index: int

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    def to_tf_config(self) -> str:
        """The TF_CONFIG that describes this worker."""
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})


def parse_tf_config(text: str | None) -> Cluster | None:
    """Reads and checks TF_CONFIG.

    Args:
        text: the environment variable's value; None or empty if it is not set.

    Returns:
        The cluster; None if TF_CONFIG names no cluster: one worker alone.

    Raises:
        ClusterError: not JSON, no worker list, a malformed or repeated address, or a task
            that is not in the list.
    """
    if text is None or not text.strip():
        return None

    def broken(what: str) -> ClusterError:
        return ClusterError(
            f"TF_CONFIG must {what} (TF_CONFIG={text!r}). The form is "
            '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}.'
        )

    try:
        config = json.loads(text)
    except ValueError as error:
        raise broken(f"be JSON, got {error}") from None
    if config == {}:
        return None
    if not isinstance(config, dict) or not isinstance(config.get("cluster"), dict):
        raise broken('have an object "cluster"')
    jobs = config["cluster"]
    if unknown := sorted(set(jobs) - {"chief", "worker"}):
        raise broken(f"name only jobs chief and worker, got {', '.join(unknown)}")
    chief, worker = jobs.get("chief", []), jobs.get("worker", [])
    if not isinstance(chief, list) or not isinstance(worker, list) or len(chief) > 1 or not chief + worker:
        raise broken("list the workers' addresses")
    addresses = chief + worker
    for address in addresses:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise broken(f"list addresses as host:port, got {address!r}")
    if len(set(addresses)) != len(addresses):
        raise broken("list each address once")
    task = config.get("task")
    if not isinstance(task, dict) or task.get("type") not in ("chief", "worker"):
        raise broken('have a "task" of type worker or chief')
    job = jobs.get(task["type"], [])
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdigit():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(job):
        raise broken(f"have a task index from 0 to {len(job) - 1}, got {index!r}")
    return Cluster(addresses=tuple(addresses), index=index + (len(chief) if task["type"] == "worker" else 0))


def local_clusters(num_workers: int) -> list[Cluster]:
    """Describes workers on this machine, on ports that are free now.

    Args:
        num_workers: at least 1.

    Returns:
        One cluster description a worker.

    Raises:
        UsageError: fewer than one worker.
    """
    if num_workers < 1:
        raise UsageError(f"--workers must be >= 1, got {num_workers}.")
    with ExitStack() as stack:
        addresses = []
        for _ in range(num_workers):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
    return [Cluster(addresses=tuple(addresses), index=index) for index in range(num_workers)]


class Preflight:
    """Makes sure every peer is there before TensorFlow waits for it without limit.

    Listens on this worker's own port from the moment it is created, so that peers can find
    it while it still imports TensorFlow; `wait` returns when all peers answer.

    Args:
        cluster: who takes part.

    Raises:
        ClusterError: this worker's own port is taken.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        port = int(cluster.addresses[cluster.index].rpartition(":")[2])
        self._listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._listener.family == socket.AF_INET6:
            self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            self._listener.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"worker {cluster.index}'s port must be free, got {error.strerror} "
                f"({cluster.addresses[cluster.index]}). End what uses it, or name another port in TF_CONFIG."
            ) from None
        self._listener.listen(128)

    def wait(self, timeout_s: float) -> None:
        """Waits until all peers answer, then frees the port for TensorFlow.

        Args:
            timeout_s: for all of them together, in seconds.

        Raises:
            ClusterError: names the peers that did not answer.
        """
        deadline = time.monotonic() + timeout_s
        missing = [index for index in range(self._cluster.num_workers) if index != self._cluster.index]
        try:
            while missing:
                missing = [index for index in missing if not self._answers(index)]
                if missing and time.monotonic() > deadline:
                    names = ", ".join(f"worker {i} at {self._cluster.addresses[i]}" for i in missing)
                    raise ClusterError(
                        f"every worker must be reachable within {timeout_s:g} s, got no answer from {names} "
                        f"(asked by worker {self._cluster.index}). Start it, or check address and firewall."
                    )
                if missing:
                    time.sleep(0.2)
        finally:
            self._listener.close()

    def _answers(self, index: int) -> bool:
        host, _, port = self._cluster.addresses[index].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        except OSError:
            return False
        return True
