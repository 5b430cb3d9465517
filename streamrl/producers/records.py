"""Records of a data set by their number: JSON lines, Parquet, data sets of the hub, Python."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.config import SourceConfig
from streamrl.config.data import HUB
from streamrl.errors import DataError, PluginError, StreamrlError, need_packages
from streamrl.plugin_import import build_plugin, import_plugin, last_line, look_in

HEAD: Final = 1024  # records of each source whose tokens the fingerprint covers
_BLOCK: Final = 16 << 20
_WINDOW: Final = 4096  # records of an iterable that are kept, so that Redis may go back without reading it again


class Records(ABC):
    """A source: `where` names it in errors, relative paths of images begin at `folder`.

    `size` is the number of its records; None: it is an iterable, read from its beginning. `identity` is what the
    fingerprint covers of the source besides the tokens of its first prompts; empty: nothing is known but what it gives.
    """

    where: str
    folder = Path()
    size: int | None
    identity = b""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        """The number from 0 at which each record is found, and the record, or its JSON; `rows` ascend in an iterable.

        Rows of an iterable go on behind its last record with its first.
        """

    def first(self, count: int) -> list[tuple[int, Any]]:
        """Up to `count` records from the beginning, none twice."""
        return self.read(range(min(count, self.size or 0)))


def open_records(source: SourceConfig, plugin_paths: Iterable[Path], most: int | None = None) -> Records:
    """`DataError`: it cannot be read, or is empty; `PluginError`: code that cannot be used. `most` lines are enough."""
    records = _open(source, plugin_paths, most)
    if not records.first(1):
        raise DataError(f"{records.where} is empty", 'a record is {"prompt": "2+2=", "answer": "4"}')
    return records


def _open(source: SourceConfig, plugin_paths: Iterable[Path], most: int | None) -> Records:
    place = source.source
    if isinstance(place, Path):
        return Table.of_file(place) if place.suffix == ".parquet" else JsonLines(place, most)
    if spec := HUB.fullmatch(place):
        return Table.of_hub(place, spec)
    target = import_plugin(place, look_in(plugin_paths), role="data")
    if not callable(target):
        raise PluginError(f"data {place} is no class or function", "name one that makes the records when it is called")
    found = build_plugin(target, f"data {place}", source.args)
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return PythonSequence(place, found)
    if hasattr(found, "__iter__"):
        return PythonIterable(place, lambda: build_plugin(target, f"data {place}", source.args))
    raise PluginError(f"data {place} is neither a sequence nor an iterable", "give it __iter__")


class JsonLines(Records):
    """Lines are found once, in one pass over the file, and read when they are asked for; empty lines are no records."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.where, self.folder = str(path), path.parent
        try:
            self._file = path.open("rb")
            self._index(np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8), most)
        except OSError as error:
            what = f"cannot read the prompts {path}: {error.strerror}"
            raise DataError(what, "set data.train (and data.held_out)") from error

    def _index(self, content: npt.NDArray[np.uint8], most: int | None) -> None:
        digest, begins = xxhash.xxh3_128(), [np.zeros(1, np.int64)]
        for start in range(0, len(content), _BLOCK):
            block = content[start : start + _BLOCK]
            digest.update(block.data)
            begins.append(np.flatnonzero(block == ord("\n")) + (start + 1))
            if most is not None and sum(map(len, begins)) > most:
                break  # the line that has begun is left out
        else:
            if len(content) and content[-1] != ord("\n"):
                begins.append(np.full(1, len(content)))
        self._begins = np.concatenate(begins)
        doubtful = np.flatnonzero(content[self._begins[:-1]] != ord("{")).tolist()
        empty = [line for line in doubtful if not self._line(line).strip()]
        count = len(self._begins) - 1
        self._lines: Sequence[int] = np.delete(np.arange(count), empty).tolist() if empty else range(count)
        self.size = len(self._lines)
        self.identity = content.tobytes() if self.size <= HEAD else digest.digest()

    def _line(self, line: int) -> bytes:
        begin, end = int(self._begins[line]), int(self._begins[line + 1])
        return os.pread(self._file.fileno(), end - begin, begin)

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        lines = [self._lines[row] for row in rows]
        return [(line, self._line(line)) for line in lines]


class Table(Records):
    """Rows of a Parquet file, in memory, or of a data set of the hub, mapped from its cache; `rows` gives a slice."""

    def __init__(self, where: str, size: int, identity: bytes, rows: Callable[[int, int], list[Any]]) -> None:
        self.where, self.size, self.identity, self._rows = where, size, identity, rows
        self.folder = Path(where).parent

    @classmethod
    def of_file(cls, path: Path) -> Table:
        need_packages(f"{path.name}, a Parquet file,", "pyarrow", extra="parquet")
        from pyarrow import ArrowException, parquet

        try:
            table = parquet.ParquetFile(path).read()
            identity = xxhash.xxh3_128_digest(np.memmap(path, np.uint8, "r").data)
        except (OSError, ArrowException) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read the prompts {path}: {reason}", "is it a Parquet file?") from error
        return cls(str(path), len(table), identity, lambda begin, end: table[begin:end].to_pylist())

    @classmethod
    def of_hub(cls, place: str, spec: re.Match[str]) -> Table:
        need_packages(f"{place}, a data set of the hub,", "datasets", extra="datasets")
        import datasets
        from datasets.exceptions import DatasetsError

        try:
            found = datasets.load_dataset(spec["name"], spec["config"], split=spec["split"])
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            why = " ".join(str(error.__cause__ or error).split())
            hint = "write hf:OWNER/NAME:CONFIG/SPLIT; without the hub it has to be in the cache (HF_HOME)"
            raise DataError(f"{place} cannot be loaded: {why}", hint) from error

        def rows(begin: int, end: int) -> list[Any]:
            columns = found[begin:end]
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

        return cls(place, len(found), found._fingerprint.encode(), rows)  # noqa: SLF001

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        if isinstance(rows, range):
            return list(zip(rows, self._rows(rows.start, rows.stop), strict=True))
        return [found for row in rows for found in self.read(range(row, row + 1))]


class PythonSequence(Records):
    def __init__(self, where: str, found: Any) -> None:
        self.where, self.size, self._found = where, len(found), found

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        return [(row, _called(self.where, row, partial(self._found.__getitem__, row))) for row in rows]


class PythonIterable(Records):
    """Built and read anew for each pass, and when an earlier record is asked for that is not kept."""

    size = None

    def __init__(self, where: str, build: Callable[[], Iterable[Any]]) -> None:
        self.where, self._build = where, build
        self._begin()

    def _begin(self) -> None:
        self._records, self._read = self._passes(), 0
        self._recent: deque[tuple[int, Any]] = deque(maxlen=_WINDOW)

    def _passes(self) -> Iterator[tuple[int, Any]]:
        while True:
            row = -1
            for row, record in enumerate(self._build()):
                yield row, record
            if row < 0:
                raise DataError(f"{self.where} is empty when it is read again", "return a new iterator each time")

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        return [self._at(row) for row in rows]

    def first(self, count: int) -> list[tuple[int, Any]]:
        """From a pass of its own."""
        return list(_called(self.where, 0, lambda: list(islice(enumerate(self._build()), count))))

    def _at(self, row: int) -> tuple[int, Any]:
        if row < self._read - len(self._recent):
            self._begin()
        while row >= self._read:
            self._recent.append(_called(self.where, self._read, lambda: next(self._records)))
            self._read += 1
        return self._recent[row - self._read]


def _called(where: str, row: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StreamrlError:
        raise
    except Exception as error:
        hint = "streamrl --debug shows the traceback"
        raise PluginError(f"data {where}: record {row} cannot be read: {last_line(error)}", hint) from error
