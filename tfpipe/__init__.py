"""tfpipe: from raw files to steps, with the reason why a step takes as long as it does.

The journey, one module a stage:

    raw files --beam_jobs--> dataset directory (manifest.py, schema.py, tfrecord.py)
        --pipeline.py--> batches (config.py, sharding.py)
        --trainer.py--> step times (cluster.py, models.py)
        --attribution.py--> parts, verdict, advice --report.py--> terminal, HTML

Public names load on first use, so that `import tfpipe` costs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Feature": "tfpipe.schema",
    "Schema": "tfpipe.schema",
    "Manifest": "tfpipe.manifest",
    "PipelineConfig": "tfpipe.config",
    "TrainerConfig": "tfpipe.config",
    "TfpipeError": "tfpipe.errors",
    "make_dataset": "tfpipe.pipeline",
    "distribute": "tfpipe.pipeline",
    "measure": "tfpipe.trainer",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
