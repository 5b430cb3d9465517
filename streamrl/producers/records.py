"""Records of a data set by their number: JSON lines, Parquet, data sets of the hub, Python."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.config import SourceConfig
from streamrl.config.data import HUB
from streamrl.errors import DataError, PluginError, StreamrlError, need_packages
from streamrl.plugin_import import build_plugin, import_plugin, last_line, look_in

_T = TypeVar("_T")
HEAD: Final = 1024
"""Records of each source whose tokens the fingerprint covers."""
_BLOCK: Final = 16 << 20
_WINDOW: Final = 4096  # records of an iterable that are kept, so that Redis may go back without reading it again
_BRACE: Final = ord("{")


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
        assert self.size is not None
        return self.read(range(min(count, self.size)))


def open_records(source: SourceConfig, plugin_paths: Iterable[Path], most: int | None = None) -> Records:
    """`DataError`: it cannot be read or is empty; `PluginError`: code that cannot be used.

    `most`: no more lines of a file are looked for.
    """
    records = _open(source, plugin_paths, most)
    if not records.first(1):
        raise DataError(f"{records.where} is empty", 'a record is {"prompt": "2+2=", "answer": "4"}')
    return records


def _open(source: SourceConfig, plugin_paths: Iterable[Path], most: int | None) -> Records:
    place = source.source
    if isinstance(place, Path):
        return Table.of_file(place) if place.suffix == ".parquet" else JsonLines(place, most)
    if HUB.fullmatch(place):
        return Table.of_hub(place)
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
            self._file = path.open("rb", buffering=0)
            self._index(most)
        except OSError as error:
            what = f"cannot read the prompts {path}: {error.strerror}"
            raise DataError(what, "set data.train (and data.held_out)") from error

    def _index(self, most: int | None) -> None:
        digest, buffer, offset, at_start, ended = xxhash.xxh3_128(), bytearray(_BLOCK), 0, True, False
        begins: list[npt.NDArray[np.int64]] = []
        doubtful: list[npt.NDArray[np.int64]] = []  # lines that begin with no brace may be empty
        while most is None or sum(map(len, begins)) <= most:
            size = self._file.readinto(buffer)
            if ended := not size:
                break
            digest.update(memoryview(buffer)[:size])
            block = np.frombuffer(buffer, np.uint8, size)
            found = np.flatnonzero(block == ord("\n")) + 1
            here = np.concatenate([[0] if at_start else [], found]).astype(np.int64)
            at_start = bool(len(here)) and int(here[-1]) == size
            here = here[: len(here) - at_start]
            begins.append(here + offset)
            doubtful.append(here[block[here] != _BRACE] + offset)
            offset += size
        # Without the end of the file, the last line that has begun ends elsewhere: its begin is an end.
        self._begins = np.concatenate([*begins, [offset] if ended else []]).astype(np.int64)
        lines = np.searchsorted(self._begins, np.concatenate([*doubtful, []])).astype(np.int64)
        count = len(self._begins) - 1
        empty = [line for line in lines.tolist() if line < count and not self._line(line).strip()]
        self._lines: Sequence[int] = np.delete(np.arange(count), empty).tolist() if empty else range(count)
        self.size = len(self._lines)
        self.identity = os.pread(self._file.fileno(), offset, 0) if self.size <= HEAD else digest.digest()

    def _line(self, line: int) -> bytes:
        begin, end = int(self._begins[line]), int(self._begins[line + 1])
        return os.pread(self._file.fileno(), end - begin, begin)

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        lines = [self._lines[row] for row in rows]
        return [(line, self._line(line)) for line in lines]


class Table(Records):
    """Rows of an Arrow table: a Parquet file in memory, or a data set of the hub, mapped from its cache."""

    def __init__(self, where: str, table: Any, identity: bytes, folder: Path = Path()) -> None:
        self.where, self.folder, self.identity = where, folder, identity
        self.size, self._table = len(table), table

    @classmethod
    def of_file(cls, path: Path) -> Table:
        need_packages(f"{path.name}, a Parquet file,", "pyarrow", extra="parquet")
        from pyarrow import ArrowException, parquet

        try:
            with path.open("rb") as file:
                digest = xxhash.xxh3_128()
                while block := file.read(_BLOCK):
                    digest.update(block)
                return cls(str(path), parquet.ParquetFile(file).read(), digest.digest(), path.parent)
        except (OSError, ArrowException) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read the prompts {path}: {reason}", "is it a Parquet file?") from error

    @classmethod
    def of_hub(cls, place: str) -> Table:
        need_packages(f"{place}, a data set of the hub,", "datasets", extra="datasets")
        import datasets
        from datasets.exceptions import DatasetsError

        spec = HUB.fullmatch(place)
        assert spec is not None, "the configuration refuses others"
        try:
            found = datasets.load_dataset(spec["name"], spec["config"], split=spec["split"])
        except (ConnectionError, TimeoutError) as error:
            hint = f"load it once where the hub is reachable (HF_HOME is the cache): datasets.load_dataset({place!r})"
            raise DataError(f"{place} is neither cached nor reachable: {_said(error)}", hint) from error
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            hint = "write hf:OWNER/NAME:CONFIG/SPLIT, or hf:OWNER/NAME:SPLIT"
            raise DataError(f"{place} cannot be loaded: {_said(error)}", hint) from error
        return cls(place, found.with_format("arrow"), found._fingerprint.encode())  # noqa: SLF001

    def read(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        pieces = [rows] if isinstance(rows, range) else [range(row, row + 1) for row in rows]
        return [
            (row, record)
            for piece in pieces
            for row, record in zip(piece, self._table[piece.start : piece.stop].to_pylist(), strict=True)
        ]


def _said(error: BaseException) -> str:
    """The cause that says most: errors of `datasets` wrap it in sentences about the library."""
    inner = error.__cause__
    return " ".join(str(inner if isinstance(inner, ValueError) else error).split())


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
        return _called(self.where, 0, lambda: list(islice(enumerate(self._build()), count)))

    def _at(self, row: int) -> tuple[int, Any]:
        if row < self._read - len(self._recent):
            self._begin()
        while row >= self._read:
            self._recent.append(_called(self.where, self._read, lambda: next(self._records)))
            self._read += 1
        return self._recent[row - self._read]


def _called(where: str, row: int, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except StreamrlError:
        raise
    except Exception as error:
        hint = "streamrl --debug shows the traceback"
        raise PluginError(f"data {where}: record {row} cannot be read: {last_line(error)}", hint) from error
