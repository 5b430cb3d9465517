"""The turns of a sample for people: the tree of an episode, or the one turn of a single answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from streamrl.commands import output
from streamrl.config import ModelConfig
from streamrl.errors import ConfigError
from streamrl.monitor.lines import duration, printable, shortened
from streamrl.wire import PROMPT, Int32Array, Sample, Turn

_COUNTS: Final = ("replayed", "restarts", "dropped", "auxiliary")
Decode = Callable[[Int32Array], str]


def decoder_of(config: ModelConfig) -> Decode | None:
    """What makes text of token ids; None, with a note, where the tokenizer cannot be loaded."""
    try:
        from streamrl.producers.tokenizer import Tokenizer

        return partial(Tokenizer.load(config).decode, special=True)
    except (ConfigError, ImportError) as error:
        output.note(f"warning: the turns are shown without their text: {error}")
        return None


def turns_of(sample: Sample) -> list[Turn]:
    """The turns of a sample; a single answer is one sampled turn."""
    if sample.turns or not sample.tokens:
        return sample.turns
    count = len(sample.tokens) // 4
    return [Turn(parent=PROMPT, sampled=count, finish=sample.finish, model_seconds=sample.seconds)]


def episode_data(sample: Sample, decode: Decode | None) -> dict[str, Any]:
    """The turns of a sample and how it ended, as plain data; `text` is null without a tokenizer."""
    ids, versions, begin = sample.token_ids, sample.token_versions, 0
    found = []
    for number, turn in enumerate(turns_of(sample)):
        own = ids[begin : begin + turn.sampled] if turn.sampled else turn.observed_ids
        sampled_by = np.unique(versions[begin : begin + turn.sampled]).tolist()
        begin += turn.sampled
        found.append(
            {
                "turn": number,
                "parent": turn.parent,
                "role": turn.role,
                "sampled": bool(turn.sampled),
                "tokens": len(own),
                "text": None if decode is None else decode(own),
                "versions": sampled_by,
                "finish": turn.finish or None,
                "reward": turn.reward,
                "tools": [{"name": use.name, "outcome": use.outcome, "seconds": use.seconds} for use in turn.tools],
                "media": list(turn.media),
                "model_seconds": turn.model_seconds,
                "tool_seconds": turn.tool_seconds,
                "cached": turn.cached,
            }
        )
    return {"stop": sample.stop, **{name: getattr(sample, name) for name in _COUNTS}, "turns": found}


def episode_lines(data: dict[str, Any], width: int) -> Iterator[str]:
    """The tree of `episode_data`: a branch beside an earlier one is indented, and says where it begins."""
    facts = [f"ended: {data['stop']}"] if data["stop"] else []
    facts += [f"{name} {data[name]}" for name in _COUNTS if data[name]]
    if facts:
        yield f"    {'  '.join(facts)}"
    depths: dict[int, int] = {}
    continued: set[int] = set()
    for turn in data["turns"]:
        parent = turn["parent"]
        forks = parent in continued or (parent < 0 and turn["turn"] > 0)
        depths[turn["turn"]] = depths.get(parent, 0) + forks
        continued.add(parent)
        indent = "    " + "  " * depths[turn["turn"]]
        yield indent + "  ".join(_turn_facts(turn, forks))
        for use in turn["tools"]:
            yield f"{indent}  tool {printable(use['name'])}: {use['outcome']} in {duration(use['seconds'])}"
        if turn["text"] is not None:
            yield f"{indent}  {shortened(turn['text'], width)}"


def _turn_facts(turn: dict[str, Any], forks: bool) -> list[str]:
    facts = [f"{turn['turn']} {turn['role']}"]
    if forks:
        facts.append("a branch of its own" if turn["parent"] < 0 else f"after {turn['parent']}")
    facts.append(f"{turn['tokens']} tokens")
    if turn["sampled"]:
        facts[-1] += f" ({turn['finish']}) by {','.join(f'v{version}' for version in turn['versions'])}"
        facts.append(f"in {duration(turn['model_seconds'])}")
    if turn["reward"] is not None:
        facts.append(f"reward {turn['reward']:g}")
    if turn["media"]:
        facts.append(f"{len(turn['media'])} images")
    return facts
