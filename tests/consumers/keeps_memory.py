"""A reward that never lets go of what it has seen."""

import mmap

BYTES = 1 << 20
_seen = []


async def keeps(sample):
    block = mmap.mmap(-1, BYTES)  # pages of its own: the heap of the process may have free ones
    block.write(b"x" * BYTES)
    _seen.append(block)
    return 1.0


def forget():
    _seen.clear()


class Keeper:
    async def score(self, sample):
        return await keeps(sample)

    async def __call__(self, sample):
        return await keeps(sample)
