"""Which runner carries a conversion out, and with what options.

The local runner is pinned: Beam's own choice differs by version and by what else is installed. On an
engine of several machines, every worker must have tfpipe installed, and must see the input and the
output by the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions

from tfpipe.errors import UsageError

# Input below this is converted in this process: starting workers takes longer than the work.
IN_MEMORY_BYTES = 24 << 20
LOCAL = ("FnApiRunner", "DirectRunner", "BundleBasedDirectRunner")
ENGINES = ("DaskRunner", "FlinkRunner", "SparkRunner", "PortableRunner", "DataflowRunner")
# Dask shuffles by tasks: their number grows faster than that of the partitions.
_DASK_MAX_PARTITIONS = 512


def engine_of(beam_args: Sequence[str]) -> str:
    """The engine that the user's options name: one of `ENGINES`, or "" for the local runner.

    Args:
        beam_args: for Beam.

    Returns:
        Its name, without a module.

    Raises:
        UsageError: a runner that is neither.
    """
    given = PipelineOptions(list(beam_args)).view_as(StandardOptions).runner or LOCAL[0]
    name = str(given).rsplit(".", 1)[-1]
    if name in LOCAL:
        return ""
    if name not in ENGINES:
        raise UsageError(
            f"--runner must be FnApiRunner, the local runner that this command pins, or one of "
            f"{', '.join(ENGINES)}, got {given!r}."
        )
    return name


def engine_options(beam_args: Sequence[str], engine: str, num_splits: int) -> PipelineOptions:
    """The user's options for an engine, with defaults for what they don't say.

    Args:
        beam_args: for Beam.
        engine: one of `ENGINES`.
        num_splits: of the input.

    Returns:
        The options.

    Raises:
        UsageError: the engine's package is not installed.
    """
    args = list(beam_args)
    if engine == "DaskRunner":
        try:
            import distributed  # noqa: F401
            from apache_beam.runners.dask import dask_runner  # noqa: F401  (Beam knows its options by then)
        except ImportError:
            raise UsageError(
                "DaskRunner must have its packages, got no distributed. Install them: pip install 'tfpipe[dask]'"
            ) from None
        # Beam's default puts 128 elements into one partition, which one thread works on.
        if not any(arg.startswith(("--dask_npartitions", "--dask_partition_size")) for arg in args):
            args.append(f"--dask_npartitions={min(num_splits, _DASK_MAX_PARTITIONS)}")
    options = PipelineOptions(args)
    if engine == "DaskRunner":  # which Beam knows by its full name alone
        options.view_as(StandardOptions).runner = "apache_beam.runners.dask.dask_runner.DaskRunner"
    return options


def local_options(beam_args: Sequence[str], work_bytes: int) -> PipelineOptions:
    """The user's options for the local runner, with defaults for what they don't say.

    Args:
        beam_args: for Beam.
        work_bytes: see `FileSource`.

    Returns:
        The options: worker processes over all cores, or none for a small input.
    """
    options = PipelineOptions(list(beam_args))
    given = {arg.split("=")[0] for arg in beam_args}
    direct = options.view_as(DirectOptions)
    if "--direct_running_mode" not in given:
        small = work_bytes < IN_MEMORY_BYTES and "--direct_num_workers" not in given
        direct.direct_running_mode = "in_memory" if small else "multi_processing"
    if direct.direct_running_mode == "in_memory":
        direct.direct_num_workers = 1
    elif not direct.direct_num_workers or "--direct_num_workers" not in given:
        direct.direct_num_workers = len(os.sched_getaffinity(0))
    return options
