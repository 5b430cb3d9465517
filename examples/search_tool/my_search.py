"""A search engine as a tool, and the reward of Search-R1; the run file names `my_search:Search` and its reward."""

import re
import string

import aiohttp

from streamrl.consumers import RewardSample


class Search:
    """Asks the retrieval server of Search-R1: `POST /retrieve {"queries": [...], "topk": 3}`."""

    def __init__(self, url: str, passages: int = 3) -> None:
        self._url, self._passages = url, passages

    async def search(self, query: str) -> str:
        """Search Wikipedia and return passages.

        Args:
            query: what to look for.
        """
        asked = {"queries": [query], "topk": self._passages, "return_scores": True}
        async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(self._url, json=asked) as answer:
            [found] = (await answer.json())["result"]
        return "\n".join(entry["document"]["contents"] for entry in found)


ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(sample: RewardSample) -> float:
    """1 if the text in the last <answer> is one of `golden_answers`, but for case, articles, points and white space."""
    answers = re.findall(r"<answer>(.*?)</answer>", sample.text, re.DOTALL)
    right = {normalised(answer) for answer in sample.prompt.metadata["golden_answers"]}
    return float(bool(answers) and normalised(answers[-1]) in right)


def normalised(text: str) -> str:
    """As SQuAD's official script compares answers."""
    return " ".join(ARTICLES.sub(" ", "".join(c for c in text.lower() if c not in string.punctuation)).split())
