"""A bounded archive: the newest groups, and an even sample of all older ones.

While the files take too much, the oldest are thinned: of 2, later of 4, 8, ... groups one stays. Which one follows from
the id of the group, so a group that was written twice stays or goes as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import zstandard

from streamrl.archive.reader import read_file
from streamrl.atomic import draft_of
from streamrl.errors import ConfigError, WireError

_SAMPLE: Final = 4
"""The sample of old groups takes at most one part in so many of the limit."""
_MOST: Final = 1 << 32


def thin(files: Sequence[Path], limit: int) -> None:
    """Thin finished files, the oldest first, until they take `limit` bytes; without room for a draft one goes."""
    sizes = {file: file.stat().st_size for file in files}
    over = sum(sizes.values()) > limit
    kept = {file: one_in for file in files if over and (one_in := _kept_of(file))}
    sizes = {file: sizes[file] for file in kept}
    while sum(sizes.values()) > limit:
        thinned = [file for file in sizes if kept[file] > 1]
        untouched = [file for file in sizes if kept[file] == 1]
        one_in = max((kept[file] for file in thinned), default=2)
        chosen = untouched[:1]
        if not untouched or sum(sizes[file] for file in thinned) > limit // _SAMPLE:
            one_in, chosen = 2 * one_in, thinned
        for file in chosen:
            kept[file] = one_in
            if not _rewrite(file, one_in):
                file.unlink(missing_ok=True)
                del sizes[file]
            else:
                sizes[file] = file.stat().st_size


def _kept_of(file: Path) -> int:
    """How thin a file is; 0: it has no header yet, or none that can be read."""
    try:
        header, _ = read_file(file)
    except ConfigError:
        return 0
    return 0 if header is None else header.one_in


def _rewrite(file: Path, one_in: int) -> int:
    """Keep one group in `one_in` of a file; return how many that are; 0: none, or the disk has no room for a draft."""
    count, draft = 0, draft_of(file)
    header, groups = read_file(file)
    if header is None or one_in > _MOST or file.stat().st_size > shutil.disk_usage(file.parent).free:
        return 0
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    try:
        with draft.open("wb") as raw:
            # A WireError: the file is damaged from there on.
            with compressor.stream_writer(raw, closefd=False) as out, contextlib.suppress(WireError):
                out.write(msgspec.msgpack.encode(msgspec.structs.replace(header, one_in=one_in)))
                for group in groups:
                    if zlib.crc32(b"%d" % group.group_id) % one_in == 0:
                        out.write(msgspec.msgpack.encode(group))
                        count += 1
            os.fsync(raw.fileno())
        draft.replace(file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        count = 0
    finally:
        draft.unlink(missing_ok=True)  # it would take room from a full disk
    return count
