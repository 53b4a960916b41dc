"""Options as frozen dataclasses of plain values, with a JSON round trip.

Comes in: keyword arguments, or a JSON file. Goes out: values that were checked once, here.
`dataclasses.replace` varies them. Every default that differs from TensorFlow's names the
measurement that chose it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tfpipe.errors import UsageError

AUTOTUNE = -1  # tf.data.AUTOTUNE, without importing TensorFlow

C = TypeVar("C", bound="_Config")


class _Config:
    """JSON round trip for the frozen dataclasses below."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[C], obj: Any, *, where: str) -> C:
        """Builds the configuration from a JSON object.

        Raises:
            UsageError: not an object, an unknown key, or a value out of range.
        """
        if not isinstance(obj, Mapping):
            raise UsageError(f"a {cls.__name__} must be a JSON object, got {type(obj).__name__} ({where}).")
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(obj) - set(known)):
            raise UsageError(
                f"a {cls.__name__}'s keys must be among {', '.join(known)}, "
                f"got {', '.join(unknown)} ({where})."
            )
        try:
            return cls(**obj)
        except UsageError as error:
            raise UsageError(f"{error} ({where})") from None

    @classmethod
    def load(cls: type[C], path: str | os.PathLike[str]) -> C:
        """Reads the configuration from a JSON file.

        Raises:
            UsageError: the file is missing, no JSON, or does not fit.
        """
        try:
            with open(path, encoding="utf-8") as file:
                obj = json.load(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"a configuration must be a readable JSON file, got {error} ({path}).") from None
        return cls.from_json(obj, where=str(path))

    def _require(self, name: str, minimum: int, *, also: tuple[int, ...] = ()) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or (value < minimum and value not in also):
            extra = f" or {', '.join(map(str, also))}" if also else ""
            raise UsageError(f"{name} must be an integer >= {minimum}{extra}, got {value!r}.")

    def _require_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, got {value!r}.")

    def _require_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(_Config):
    """How records become batches.

    Attributes:
        per_worker_batch_size: records a worker takes per step; the global batch is this
            times the number of workers.
        drop_remainder: whether the last, smaller batch of an epoch is dropped.
        sharding: how workers share the files. "per_worker": each worker builds its own
            pipeline over whole files, shared out evenly by the manifest's record counts.
            "file": one pipeline of global batches under
            `strategy.experimental_distribute_dataset` with AutoShardPolicy.FILE.
        shuffle_buffer_records: size of the record shuffle; 0 turns off both the file and
            the record shuffle. The converter has placed records by a random permutation,
            so that a small buffer suffices. Up to four times as many serialized records lie
            in memory.
        seed: of file and record shuffle; the epoch is mixed in.
        cycle_length: files read at the same time.
        block_length: read batches taken from one file before the next one's turn.
        num_parallel_calls: of interleave and parse; 0: one for each CPU that this process may
            use (affinity, container limit); -1 lets TensorFlow tune it.
        read_batch_size: records that travel as one element out of the interleave; fewer if
            they would exceed 1 MiB.
        read_buffer_bytes: of each open file.
        cache: "none", or "memory": compressed bytes are read and inflated once.
        map_num_parallel_calls: batches that a user's map works on at the same time;
            -1 lets TensorFlow tune it.
        prefetch_batches: batches prepared ahead of the step; -1 lets TensorFlow tune it.
        fill_values: by nullable feature: the value that stands for a null. A nullable
            feature without one gets a companion `NAME_present` (bool) in the batch.
        deterministic: whether the same seed gives the same order.
    """

    # Where a default differs from TensorFlow's: measured on the corpus of
    # benchmarks/pipeline_benchmark.py (40 columns, 790 bytes a record, gzip) on 2 busy cores. Best
    # of interleaved epochs; figures that stand in one comment are from one run.
    per_worker_batch_size: int = 256
    drop_remainder: bool = False
    sharding: str = "per_worker"  # TensorFlow: AUTO, which may fall back to reading everything everywhere
    # TensorFlow: no shuffle, 9.9 us of CPU a record; with it 13.0. Single records instead of whole
    # windows: 3 us more. 8192 is enough for records that the converter has permuted.
    shuffle_buffer_records: int = 8192
    seed: int = 0
    cycle_length: int = 4  # TensorFlow: one a core. 2, 4 and 8 are within the noise on a local disk
    block_length: int = 1
    # TensorFlow: none; not to be told from one a core on 2 busy cores, meant for more of them. With
    # nothing left to tune, the tuner is switched off: 10.0 us of CPU a record instead of 10.8.
    num_parallel_calls: int = 0
    # TensorFlow hands on single records: 64k records/s against 77k in blocks of 64. Blocks of 128,
    # 256, 512 (another run): 131k, 140k, 160k.
    read_batch_size: int = 512
    read_buffer_bytes: int = 1 << 20  # TensorFlow: 256 KiB. 64 KiB to 4 MiB within the noise on a local disk
    cache: str = "none"
    map_num_parallel_calls: int = 1
    prefetch_batches: int = 2  # TensorFlow: 0, and the step waits for each batch; not measured, by design
    fill_values: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = True

    def __post_init__(self) -> None:
        self._require("per_worker_batch_size", 1)
        self._require_bool("drop_remainder")
        self._require_bool("deterministic")
        self._require_choice("sharding", ("per_worker", "file"))
        self._require("shuffle_buffer_records", 0)
        self._require("seed", 0)
        self._require("cycle_length", 1)
        self._require("block_length", 1)
        self._require("num_parallel_calls", 0, also=(AUTOTUNE,))
        self._require("read_batch_size", 1)
        self._require("read_buffer_bytes", 1)
        self._require_choice("cache", ("none", "memory"))
        self._require("map_num_parallel_calls", 1, also=(AUTOTUNE,))
        self._require("prefetch_batches", 0, also=(AUTOTUNE,))
        if not isinstance(self.fill_values, Mapping):
            raise UsageError(f"fill_values must map feature names to values, got {self.fill_values!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(_Config):
    """How a run is measured and trained.

    Attributes:
        model: `module:function` that returns a Keras model, a loss and an optimizer.
        map: `module:function` applied to every parsed batch, "" for none.
        label: the feature that the model predicts.
        steps: steps of each phase in each round.
        rounds: times the phases are gone through, interleaved.
        warmup: steps before the first round, not counted.
        epochs: epochs trained for real after the measurement; 0 only measures.
        start_timeout_s: how long a worker waits for its peers at the start.
        collective_timeout_s: how long a step waits for its peers.
    """

    model: str = "tfpipe.models:mnist_cnn"
    map: str = ""
    label: str = "label"
    steps: int = 50
    rounds: int = 5
    warmup: int = 10
    epochs: int = 0
    start_timeout_s: int = 60
    collective_timeout_s: int = 120

    def __post_init__(self) -> None:
        for name in ("steps", "rounds", "start_timeout_s", "collective_timeout_s"):
            self._require(name, 1)
        for name in ("warmup", "epochs"):
            self._require(name, 0)
