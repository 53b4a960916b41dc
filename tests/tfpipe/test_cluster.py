"""TF_CONFIG is read as it is meant or refused; a missing peer is named within its time."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from tfpipe.cluster import Cluster, Preflight, local_clusters, parse_tf_config
from tfpipe.errors import ClusterError, UsageError

ADDRESSES = ["a:2222", "b:2222"]


def tf_config(cluster=None, task=None):
    return json.dumps(
        {"cluster": cluster or {"worker": ADDRESSES}, "task": task or {"type": "worker", "index": 1}}
    )


def test_round_trip():
    cluster = Cluster(addresses=("a:1", "b:2", "c:3"), index=2)
    assert parse_tf_config(cluster.to_tf_config()) == cluster


@pytest.mark.parametrize("text", [None, "", "  ", "{}"])
def test_no_cluster_is_one_worker_alone(text):
    assert parse_tf_config(text) is None


def test_chief_comes_first():
    jobs = {"chief": ["c:1"], "worker": ADDRESSES}
    assert parse_tf_config(tf_config(jobs, {"type": "chief", "index": 0})).index == 0
    found = parse_tf_config(tf_config(jobs, {"type": "worker", "index": 0}))
    assert (found.index, found.addresses) == (1, ("c:1", *ADDRESSES))


def test_index_as_text_is_understood():
    assert parse_tf_config(tf_config(task={"type": "worker", "index": "1"})).index == 1


BROKEN = [
    # TF_CONFIG                                                        what the message must say
    ("{", "be JSON"),
    ("[1]", 'an object "cluster"'),
    ('{"task": {"type": "worker", "index": 0}}', 'an object "cluster"'),
    (tf_config({"worker": []}), "list the workers' addresses"),
    (tf_config({"worker": "a:1"}), "list the workers' addresses"),
    (tf_config({"worker": ["a"]}), "host:port, got 'a'"),
    (tf_config({"worker": ["a:port"]}), "host:port, got 'a:port'"),
    (tf_config({"worker": ["a:0", "b:1"]}), "host:port, got 'a:0'"),
    (tf_config({"worker": ["a:1", "a:1"]}), "each address once"),
    (tf_config({"worker": ADDRESSES, "ps": ["p:1"]}), "got ps"),
    (tf_config(task={"type": "evaluator", "index": 0}), "type worker or chief"),
    (tf_config(task={"type": "worker", "index": 2}), "from 0 to 1, got 2"),
    (tf_config(task={"type": "worker", "index": -1}), "from 0 to 1, got -1"),
    (tf_config(task={"type": "worker", "index": None}), "from 0 to 1, got None"),
]


@pytest.mark.parametrize("text, message", BROKEN)
def test_broken_tf_config_is_refused_with_the_right_form(text, message):
    with pytest.raises(ClusterError) as caught:
        parse_tf_config(text)
    assert message in str(caught.value)
    assert "The form is" in str(caught.value)


def test_local_workers_get_ports_of_their_own():
    clusters = local_clusters(3)
    assert [cluster.index for cluster in clusters] == [0, 1, 2]
    assert len({cluster.addresses for cluster in clusters}) == 1
    assert len(set(clusters[0].addresses)) == 3


@pytest.mark.parametrize("number", [0, -1])
def test_no_worker_at_all_is_refused(number):
    with pytest.raises(UsageError, match=f">= 1, got {number}"):
        local_clusters(number)


def test_peers_find_each_other_even_if_one_is_late():
    first, second = local_clusters(2)
    early = Preflight(first)

    def join_late():
        Preflight(second).wait(10)
        with socket.create_server(("127.0.0.1", int(second.addresses[1].split(":")[1]))):
            done.wait(10)  # TensorFlow's own server listens from here on

    done = threading.Event()
    late = threading.Timer(0.5, join_late)
    late.start()
    early.wait(10)
    done.set()
    late.join()


def test_missing_peer_is_named_within_the_timeout():
    first, second, third = local_clusters(3)
    with socket.create_server(("127.0.0.1", int(second.addresses[1].split(":")[1]))):
        start_s = time.monotonic()
        with pytest.raises(ClusterError) as caught:
            Preflight(first).wait(1.0)
    assert time.monotonic() - start_s < 6
    assert f"worker 2 at {third.addresses[2]}" in str(caught.value)
    assert "worker 1" not in str(caught.value)
    assert "Start it" in str(caught.value)


def test_port_is_free_again_for_tensorflow():
    first, _ = local_clusters(2)
    preflight = Preflight(first)
    with pytest.raises(ClusterError):
        preflight.wait(0.1)
    socket.create_server(("127.0.0.1", int(first.addresses[0].split(":")[1]))).close()


def test_own_port_taken_is_refused():
    first, _ = local_clusters(2)
    port = int(first.addresses[0].split(":")[1])
    message = r"worker 0's port must be free.*another port"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ClusterError, match=message):
        Preflight(first)
