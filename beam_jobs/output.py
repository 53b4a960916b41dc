"""The output directory: claimed by one run, filled all at once, left as it was found if that fails.

    with OutputDirectory(path, mode="new", request=request) as output:
        ... write below output.staging ...
        output.publish(manifest)

Shards lie in `<output>/.staging-<id>` until all of them are verified; then they are renamed to
their exact names, and the manifest is written last: its presence is the commit. So whoever looks,
at any moment, finds the old dataset, none, or the new one.

Staging is also the ledger of what is done. A run that was killed leaves it, and one with mode
"resume" goes on from it: scans, pieces and shards that are whole are not made again. Each of them gets its
name only when it is whole, and is the same whoever makes it, so a worker that outlives its
killed run does no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from beam_jobs.outcome import FAILED, PLAN_FAILURE, RESULTS, load, mark_failed, save
from beam_jobs.scan import REJECTED
from beam_jobs.write import SHARDS
from tfpipe.errors import OutputError
from tfpipe.manifest import FILE_NAME, INDEX_FORMAT, STAGING_PREFIX, Manifest

# In staging: how the run was begun; and, once all shards are verified, the names that give way to them.
BEGUN, PUBLISHING = "begun.json", "publishing.json"
# In the manifest's source: files beside the shards.
OTHER_FILES = "other_files"
_OF_ONE_RUN = (FAILED, RESULTS, PLAN_FAILURE)


class OutputDirectory:
    """Claims a directory for one run.

    Args:
        path: the dataset directory; made if missing, with its parents.
        mode: "new": it must hold nothing. "overwrite": a dataset in it stays readable until the new
            one takes its place. "resume": goes on from what a run that did not finish left there.
        request: what makes the run's result: plain values, compared before a run is resumed.

    Attributes:
        staging: the run's own directory in it, as a string.

    Raises (on entering):
        OutputError: it holds what it must not, another run works in it, it can't be made, or the run to
            resume was begun otherwise.
    """

    def __init__(self, path: str, mode: str = "new", request: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.mode, self.request = mode, json.loads(json.dumps(request or {}))
        self.staging = ""
        self._made: list[Path] = []
        self._handle = -1
        self._old: list[str] = []
        self._left: list[str] = []
        self._published: list[Path] = []
        self._committed = self._old_is_gone = self._locked = False

    def __enter__(self) -> OutputDirectory:
        try:
            self._make()
            self._lock()
            self._claim()
        except OSError as error:
            self._clean()
            raise OutputError(
                f"the output must be a directory that can be written, got {error.strerror} ({self.path})."
            ) from None
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def ready(self) -> Manifest | None:
        """The manifest, if all there is left to do is to publish it or to take staging away."""
        if load(self.staging, PUBLISHING) is None:
            return None
        staged = (Path(self.staging) / FILE_NAME).exists()
        return Manifest.load(Path(self.staging) if staged else self.path, check_files=False)

    def publish(self, manifest: Manifest) -> None:
        """Gives the shards, and the rows that were left out, their names and commits.

        Args:
            manifest: of the shards that lie in staging.

        Raises:
            OutputError: a name is taken, or a file is not there afterwards.
            OSError: the disk.
        """
        names = _files_beside(manifest)
        publishing = load(self.staging, PUBLISHING)
        if publishing is None:
            for name in names:
                if name not in self._old and os.path.lexists(self.path / name):
                    raise OutputError(
                        f"a shard's name must be free, got something that appeared during the run or is no part "
                        f"of the dataset there ({self.path / name}). Nothing was published: move it away and "
                        f"convert again."
                    )
            for name in names:
                if (beside := Path(self.staging) / name).exists():  # shards are on the disk already
                    _sync(beside)
            manifest.save(self.staging)
            save(self.staging, PUBLISHING, {"old": self._old, "new": names}, durable=True)
            for directory in (Path(self.staging) / SHARDS, Path(self.staging)):
                _sync(directory)
        else:
            self._old = publishing["old"]
        if publishing is None or (Path(self.staging) / FILE_NAME).exists():
            self._take_places(manifest, names)
        self._committed = True
        self._remove_staging()
        os.fsync(self._handle)

    def _take_places(self, manifest: Manifest, names: list[str]) -> None:
        """Puts the new files in the place of the old ones; may be done again from any point of it."""
        staging = Path(self.staging)
        self._old_is_gone = bool(self._old)  # before it is: an interrupt may come in between
        (self.path / FILE_NAME).unlink(missing_ok=True)
        os.fsync(self._handle)
        for name in names:
            staged = staging / SHARDS / name
            staged = staged if staged.exists() else staging / name
            if staged.exists():
                self._published.append(self.path / name)
                os.replace(staged, self.path / name)
        for name in self._old:
            if name not in names:
                (self.path / name).unlink(missing_ok=True)
        for split in manifest.splits.values():
            for shard in split.shards:
                target = self.path / shard.name
                size = target.stat().st_size if target.exists() else None
                if size != shard.num_bytes:
                    raise OutputError(
                        f"a published shard must have {shard.num_bytes} bytes, got "
                        f"{'no file' if size is None else size} ({target}). Convert again."
                    )
        os.fsync(self._handle)
        os.replace(staging / FILE_NAME, self.path / FILE_NAME)
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

    def _lock(self) -> None:
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locked = True
        except BlockingIOError:
            self._made.clear()
            raise OutputError(
                f"an output directory must have one writer, got another conversion at work in it "
                f"({self.path}). Wait for it, or choose another --output."
            ) from None
        except OSError:
            pass  # a file system without locks: what another run left in it still shows

    def _claim(self) -> None:
        """Looks at what the directory holds, and finds or makes staging."""
        names = sorted(os.listdir(self.path))
        left = [name for name in names if name.startswith(STAGING_PREFIX)]
        if left and self.mode != "new" and not self._locked:
            raise OutputError(
                f"a file system must have locks for --{self.mode} to tell a conversion that was killed from one "
                f"at work, got none ({self.path}, {left[0]}). Choose another --output."
            )
        if self.mode == "resume" and left:
            self._resume(left)
            return
        if self.mode == "overwrite":
            self._old = self._replaceable(left)
            if not self._old and set(names) - set(left):
                raise OutputError(
                    f"--overwrite must find a dataset to replace, got a directory without {FILE_NAME} "
                    f"({self.path}). Choose another --output, or move away what it holds."
                )
        elif left:
            shards = sum(".tfrecord" in name for name in names)
            raise OutputError(
                f"an output directory must be empty, got {left[0]} of a conversion that did not finish"
                f"{f' and {shards} of its shards' if shards else ''} ({self.path}). Go on from it (--resume), "
                f"replace it (--overwrite), or choose another --output."
            )
        elif names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            if self.mode == "resume" and FILE_NAME in names:
                shown = "a finished dataset"
            what = "hold a conversion that did not finish" if self.mode == "resume" else "be empty or missing"
            raise OutputError(
                f"an output directory must {what}, got {shown} ({self.path}). Choose another --output"
                + (
                    ", or replace the dataset (--overwrite)."
                    if FILE_NAME in names
                    else ", or move away what it holds."
                )
            )
        self.staging = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.path)
        (Path(self.staging) / SHARDS).mkdir()
        save(self.staging, BEGUN, {"old": self._old, "request": self.request}, durable=True)
        for name in left:
            for path in (self.path / name).iterdir():
                if path.name != PUBLISHING:  # which is needed until all that it names has given way
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._left = left

    def _replaceable(self, left: list[str]) -> list[str]:
        """The files that may give way: a dataset's, or what a run left of two when it was killed amid its publishing."""
        if (self.path / FILE_NAME).exists():
            return self._files_of_dataset()
        publishing = [found for name in left if (found := load(str(self.path / name), PUBLISHING))]
        return sorted({name for found in publishing for name in (*found["old"], *found["new"])})

    def _files_of_dataset(self) -> list[str]:
        """The files that the dataset in the directory has besides its manifest; nothing else gives way."""
        manifest = Manifest.load(self.path, check_files=False)
        if manifest.source.get("format") == INDEX_FORMAT:
            raise OutputError(
                f"--overwrite must replace a dataset that was converted, got files that were only indexed and "
                f"may be the only copy ({self.path}). Choose another --output."
            )
        return _files_beside(manifest)

    def _resume(self, left: list[str]) -> None:
        if len(left) > 1:
            raise OutputError(
                f"one conversion can be resumed, got {len(left)} that did not finish ({self.path}: "
                f"{', '.join(left)}). Begin anew with --overwrite, or choose another --output."
            )
        staging = self.path / left[0]
        begun = load(str(staging), BEGUN)
        if begun is None:
            # Killed in its first moments, or while its staging was taken away: nothing in it can be trusted.
            old = self._replaceable(left)
            shutil.rmtree(staging)
            (staging / SHARDS).mkdir(parents=True)
            begun = {"old": old, "request": self.request}
            save(str(staging), BEGUN, begun, durable=True)
        for name in self.request.keys() | begun["request"].keys():
            then, now = begun["request"].get(name), self.request.get(name)
            if then != now:
                raise OutputError(
                    f"a conversion must be resumed as it was begun, got another {name}: {_shown(then)} then, "
                    f"{_shown(now)} now ({staging}). Give it the same again, or begin anew with --overwrite."
                )
        self._old = begun["old"]
        self.staging = str(staging)
        (staging / SHARDS).mkdir(exist_ok=True)
        for name in _OF_ONE_RUN:
            (staging / name).unlink(missing_ok=True)

    def _remove_staging(self) -> None:
        """Takes staging away, first what says that it can be resumed: half of it must not pass for the whole."""
        for name in (BEGUN, PUBLISHING):
            (Path(self.staging) / name).unlink(missing_ok=True)
        for name in self._left if self._committed else ():
            shutil.rmtree(self.path / name, ignore_errors=True)
        for _ in range(3):  # a worker that was not told yet may be writing
            shutil.rmtree(self.staging, ignore_errors=True)
            if not os.path.exists(self.staging):
                return
            time.sleep(0.2)

    def _is_committed(self) -> bool:
        """Whether the new manifest is in its place: an interrupt may have come before it was noted."""
        if self._committed or not self.staging:
            return self._committed
        staged = (Path(self.staging) / FILE_NAME).exists()
        return load(self.staging, PUBLISHING) is not None and not staged

    def _clean(self) -> None:
        """Removes what this run made, unless it was committed or can be resumed, and nothing else."""
        self._committed = self._is_committed()
        if self.staging and not self._committed:
            if self.mode == "resume" or self._old_is_gone:
                print(f"what is done is kept ({self.staging}): --resume goes on from it", file=sys.stderr)
            else:
                for path in self._published:
                    path.unlink(missing_ok=True)
                mark_failed(self.staging)
                self._remove_staging()
        if not self.staging or not os.path.exists(self.staging):
            for path in () if self._committed else reversed(self._made):
                with contextlib.suppress(OSError):  # it holds what others put there meanwhile
                    path.rmdir()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _files_beside(manifest: Manifest) -> list[str]:
    """The names of all files of a dataset but its manifest's."""
    names = [shard.name for split in manifest.splits.values() for shard in split.shards]
    names += [REJECTED] if manifest.num_rejected else []
    # A manifest is a file that anybody may have written: no name leads out of its directory.
    return names + [str(name) for name in manifest.source.get(OTHER_FILES, ()) if "/" not in str(name)]


def _sync(path: Path) -> None:
    """Brings a file, or the names in a directory, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."
