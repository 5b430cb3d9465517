"""A member of the broadcast in a process of its own: python member_process.py RUN_DIR NAME DEADLINE

Reads the lines of manifests from stdin, fetches each, and answers with a line: version, whole or not, broadcasts.
While RUN_DIR/slow-NAME exists, it rests before each piece for longer than the others wait.
"""

import asyncio
import sys
import time
from pathlib import Path

import orjson

from streamrl.config import WeightsConfig
from streamrl.errors import StreamrlError
from streamrl.weight_sync import broadcast
from streamrl.weight_sync.files import StagingFolder
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.tensors import map_version
from streamrl.weight_sync.transports import open_source


def make_slow(flag, seconds):
    pieces = broadcast._pieces

    def slow(*args):
        for piece in pieces(*args):
            if flag.exists():
                time.sleep(seconds)
            yield piece

    broadcast._pieces = slow


async def main(run_dir, name, deadline):
    make_slow(run_dir / f"slow-{name}", deadline / 4)
    config = WeightsConfig(transport="collective", deadline=deadline)
    staging = StagingFolder(run_dir, name)
    staging.open()
    async with open_source(config, run_dir, staging, run="r", name=name) as source:
        while line := await asyncio.to_thread(sys.stdin.readline):
            manifest = decode(line.encode())
            try:
                folder = await source.fetch(manifest)
                map_version(folder, manifest)
                answer = {"version": manifest.version, "broadcasts": source.broadcasts, "bytes": source.traffic.bytes}
                staging.trim({manifest.folder})
            except (StreamrlError, OSError) as error:
                answer = {"version": manifest.version, "error": str(error)}
            sys.stdout.write(orjson.dumps(answer).decode() + "\n")
            sys.stdout.flush()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
