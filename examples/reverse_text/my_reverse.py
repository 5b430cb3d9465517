"""The reward of prime-rl's example: how much of the text came back reversed.

The run file names it as `my_reverse:similarity`.
"""

import re
from difflib import SequenceMatcher

from streamrl.consumers import RewardSample

ANSWER = re.compile(r"<reversed_text>\s*(.*?)\s*</reversed_text>", re.DOTALL)


def similarity(sample: RewardSample) -> float:
    """Share of characters in common blocks of the answer and the reversed text, 0 to 1; 0 without the tags."""
    found = ANSWER.findall(sample.text)
    return SequenceMatcher(None, found[-1], str(sample.prompt.answer)[::-1]).ratio() if found else 0.0
