"""Many input files in little room: they travel to every worker, and a data set has a million images.

>>> FileList.of([InputFile(path="in/a.png", num_bytes=9, modified_ns=0)])[0].path
'in/a.png'
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from beam_jobs.sources import InputFile


@dataclass(frozen=True, slots=True)
class FileList(Sequence[InputFile]):
    """A sequence of input files, each made anew where it is asked for.

    Attributes:
        paths: one after the other, in UTF-8.
        ends: where each of them ends in it.
        sizes: in bytes.
        times: in nanoseconds.
        roots: those there are.
        root_numbers: of each file.
    """

    paths: bytes
    ends: array[int]
    sizes: array[int]
    times: array[int]
    roots: tuple[str, ...]
    root_numbers: array[int]

    @classmethod
    def of(cls, files: Iterable[InputFile]) -> FileList:
        """Packs files whose paths are UTF-8."""
        paths, roots = bytearray(), dict[str, int]()
        ends, sizes, times, root_numbers = (array("q") for _ in range(4))
        for file in files:
            paths += file.path.encode()
            ends.append(len(paths))
            sizes.append(file.num_bytes)
            times.append(file.modified_ns)
            root_numbers.append(roots.setdefault(file.root, len(roots)))
        return cls(bytes(paths), ends, sizes, times, tuple(roots), root_numbers)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        """The file of an index, or a tuple of those of a slice."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else 0
        return InputFile(
            path=self.paths[start : self.ends[index]].decode(),
            num_bytes=self.sizes[index],
            modified_ns=self.times[index],
            root=self.roots[self.root_numbers[index]],
        )
