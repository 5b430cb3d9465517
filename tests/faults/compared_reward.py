"""A reward that compares the responses to one prompt."""

from streamrl.consumers import GroupReward


class Rank(GroupReward):
    """Share of the other responses whose tokens add up to less."""

    async def score_group(self, samples):
        sums = [int(sample.tokens.sum()) for sample in samples]
        return [sum(other < own for other in sums) / max(1, len(sums) - 1) for own in sums]
