"""A reward that differs within a group."""


def parity(sample):
    return float(sum(sample.tokens.tolist()) % 2)
