import os
import subprocess
import sys

import pytest

from tests.helpers import REPOSITORY
from tfpipe.cpus import usable_cpus


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_affinity_mask_counts():
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    script += "from tfpipe.cpus import usable_cpus; print(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize(("quota", "cpus"), [("max", 64), ("50000", 1), ("150000", 2), ("900000", 9)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_limit_counts(tmp_path, monkeypatch, quota, cpus, version):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    if version == 2:
        write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
        write(tmp_path / "sys/fs/cgroup/a/cpu.max", f"{quota} 100000\n")  # of an enclosing group
        write(tmp_path / "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    else:
        write(tmp_path / "proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/a\n")
        group = tmp_path / "sys/fs/cgroup/cpu/a"
        write(group / "cpu.cfs_quota_us", "-1\n" if quota == "max" else f"{quota}\n")
        write(group / "cpu.cfs_period_us", "100000\n")
    assert usable_cpus(tmp_path) == cpus


def test_without_cgroups(tmp_path):
    assert usable_cpus(tmp_path) == len(os.sched_getaffinity(0))
