"""A worker process: `python -m tfpipe.worker JOB`, made by `trainer.measure`.

Comes in: the job as a JSON object, and TF_CONFIG. Goes out: events to the process that made
it (`launcher.send_event`), last the result or an error. TensorFlow is imported late: while
it loads, peers already find this worker's port open.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from tfpipe.cluster import Preflight, parse_tf_config
from tfpipe.config import PipelineConfig, TrainerConfig
from tfpipe.errors import ShardError, TfpipeError
from tfpipe.launcher import enter_worker, send_event


def main() -> int:
    """Runs the job.

    Returns:
        0, or 1 after an "error" event.

    Raises:
        BrokenPipeError: the process that made this one is gone.
    """
    enter_worker()
    try:
        result = _run(json.loads(sys.argv[1]))
    except Exception as error:
        if (meant := _meant_for_the_user(error)) is not None:
            send_event("error", message=str(meant), exit_code=meant.exit_code, traceback="", lost_peer=False)
            return 1
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        lost_peer = _is_lost_peer(error)
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        send_event("error", message=message, exit_code=1, traceback=trace, lost_peer=lost_peer)
        return 1
    send_event("result", result=result)
    return 0


def _run(job: dict[str, Any]) -> dict[str, Any]:
    trainer = TrainerConfig.from_json(job["trainer"], where="job")
    pipeline = PipelineConfig.from_json(job["pipeline"], where="job")
    cluster = parse_tf_config(os.environ.get("TF_CONFIG"))
    preflight = Preflight(cluster) if cluster else None
    import tensorflow as tf

    from tfpipe.training import train_and_measure

    try:
        return train_and_measure(
            job["data"],
            job["split"],
            pipeline,
            trainer,
            cluster=cluster,
            wait_for_peers=lambda: preflight.wait(trainer.start_timeout_s) if preflight else None,
        )
    except tf.errors.DataLossError as error:  # which does not name the file
        raise ShardError(
            f"every shard must be as it was written, got a damaged one ({job['data']}: "
            f"{str(error.message).splitlines()[0]}). `tfpipe verify {job['data']}` says which, and where; "
            f"copy it anew, or convert again."
        ) from error


def _meant_for_the_user(error: BaseException | None) -> TfpipeError | None:
    """The error of ours that began it: while tracing, TensorFlow wraps errors in its own."""
    found = None
    while error is not None:
        found = error if isinstance(error, TfpipeError) else found
        error = error.__cause__ or error.__context__
    return found


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another worker is gone or late."""
    import tensorflow as tf

    errors = tf.errors
    gone = (errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError, errors.CancelledError)
    return isinstance(error, gone) or (isinstance(error, errors.OpError) and "ollective" in str(error))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without TensorFlow's own shutdown, which waits for peers that may be gone.
    os._exit(code)
