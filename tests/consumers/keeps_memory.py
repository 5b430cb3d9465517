"""A reward that never lets go of what it has seen."""

BYTES = 1 << 20
_seen = []


async def keeps(sample):
    _seen.append(bytearray(BYTES))
    return 1.0


def forget():
    _seen.clear()


class Keeper:
    async def score(self, sample):
        return await keeps(sample)

    async def __call__(self, sample):
        return await keeps(sample)
