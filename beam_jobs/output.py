"""The output directory: claimed by one run, filled all at once, left as it was found if that fails.

    with OutputDirectory(path) as output:
        ... write below output.staging ...
        output.publish(manifest)

Shards lie in `<output>/.staging-<id>` until all of them are verified; then they are renamed to
their exact names, and the manifest is written last: its presence is the commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from beam_jobs.scan import REJECTED
from beam_jobs.write import SHARDS
from tfpipe.errors import OutputError
from tfpipe.manifest import Manifest

STAGING_PREFIX = ".staging-"


class OutputDirectory:
    """Claims a directory for one run.

    Args:
        path: the dataset directory; made if missing, with its parents.

    Attributes:
        staging: the run's own directory in it, as a string.

    Raises (on entering):
        OutputError: it holds anything, another run works in it, or it can't be made.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.staging = ""
        self._made: list[Path] = []
        self._handle = -1
        self._published: list[Path] = []
        self._committed = False

    def __enter__(self) -> OutputDirectory:
        try:
            self._make()
            self._claim()
        except OSError as error:
            self._clean()
            raise OutputError(
                f"the output must be a directory that can be written, got {error.strerror} ({self.path})."
            ) from None
        except OutputError:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def publish(self, manifest: Manifest) -> None:
        """Gives the shards, and the rows that were left out, their names and commits.

        Args:
            manifest: of the shards that lie in staging.

        Raises:
            OutputError: a name is taken, or a file is not there afterwards.
            OSError: the disk.
        """
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        for shard in shards:
            target = self.path / shard.name
            if os.path.lexists(target):
                raise OutputError(
                    f"a shard's name must be free, got something that appeared during the run ({target}). "
                    f"Nothing was published: remove it and convert again."
                )
            os.rename(Path(self.staging) / SHARDS / shard.name, target)
            self._published.append(target)
        if manifest.num_rejected:
            os.rename(Path(self.staging) / REJECTED, self.path / REJECTED)
            self._published.append(self.path / REJECTED)
        for shard in shards:
            if (size := (self.path / shard.name).stat().st_size) != shard.num_bytes:
                raise OutputError(
                    f"a published shard must have {shard.num_bytes} bytes, got {size} "
                    f"({self.path / shard.name}). Convert again."
                )
        shutil.rmtree(self.staging)
        os.fsync(self._handle)
        manifest.save(self.path)
        self._committed = True
        os.fsync(self._handle)

    def _make(self) -> None:
        missing = []
        path = self.path.absolute()
        while not path.exists():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)

    def _claim(self) -> None:
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._made.clear()
            raise OutputError(
                f"an output directory must have one writer, got another conversion at work in it "
                f"({self.path}). Wait for it, or choose another --output."
            ) from None
        except OSError:
            pass  # a file system without locks: what another run left in it still shows below
        names = sorted(os.listdir(self.path))
        left = [name for name in names if name.startswith(STAGING_PREFIX)]
        if left:
            shards = sum(".tfrecord" in name for name in names)
            raise OutputError(
                f"an output directory must be empty, got {left[0]} of a conversion that did not finish"
                f"{f' and {shards} of its shards' if shards else ''} ({self.path}). Remove what it holds "
                f"(rm -r {self.path}), or choose another --output."
            )
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise OutputError(
                f"an output directory must be empty or missing, got {shown} ({self.path}). "
                f"Choose another --output, or remove what it holds."
            )
        self.staging = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.path)
        (Path(self.staging) / SHARDS).mkdir()

    def _clean(self) -> None:
        """Removes what this run made, unless it was committed, and nothing else."""
        if self.staging:
            shutil.rmtree(self.staging, ignore_errors=True)
        if not self._committed:
            for path in self._published:
                path.unlink(missing_ok=True)
            for path in reversed(self._made):
                with contextlib.suppress(OSError):  # it holds what others put there meanwhile
                    path.rmdir()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
