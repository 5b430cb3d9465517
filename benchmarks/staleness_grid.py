"""The cells of the staleness experiment: which algorithms, with which settings, in which order."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from streamrl.config.presets import PRESETS


def _preset(name: str) -> tuple[str, ...]:
    """The keys of a preset one by one, so that a line of results says what it was when the cell ran."""
    learner = PRESETS[name]["learner"].items()
    return tuple(f"learner.{key}={json.dumps(value)}" for key, value in learner if key != "groups_per_step")


ALGORITHMS: Final[dict[str, tuple[str, ...]]] = {
    "on_policy": _preset("on_policy"),
    "high_staleness": _preset("high_staleness"),
    "naive": ("learner.correction.base=uncorrected",),
    "decoupled": _preset("grpo"),
    "tis_sequence": ("learner.correction.gates=[{use: tis, level: sequence}]",),
    "icepop": ("learner.correction.gates=[{use: icepop}]",),
    "opsm": ("learner.correction.gates=[{use: opsm, level: sequence, low: 0.5}, {use: tis}]",),
    "m2po": ("learner.correction.gates=[{use: m2po}, {use: tis}, {use: veto}]",),
    "kpop": _preset("kpop"),
    "ipo": _preset("ipo"),
    "sao": (*_preset("sao"), "learner.critic.lr=3e-4", "learner.advantage.args={alpha: 1.0}"),  # for ten tokens
    "flash_reinforce": _preset("flash_reinforce"),
    "cispo": ("learner.loss.use=cispo", "learner.correction.base=bypass"),
    "dppo": ("learner.loss.use=dppo", "learner.correction.base=bypass"),
    "topr": ("learner.loss.use=topr", "learner.correction.base=bypass"),
    "vcpo": ("learner.correction.gates=[{use: tis, level: sequence}]", "learner.correction.lr_scale=ess"),
}
"""Settings by name, as one would give them to `--set`, on top of examples/sort/run.yaml."""
SINGLE: Final = ("sao", "flash_reinforce")
"""Algorithms with one response per prompt, and as many prompts as others have responses."""
FIRST: Final = ("on_policy", "high_staleness")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What decides the result of a run.

    Attributes:
        algorithm: its name in the table.
        settings: `a.b=c`.
        staleness: S, in steps.
        seed: of sampling and of the order of prompts.
        rule: of the learning rate, `learner.correction.lr_scale`; own: what the algorithm says.
        lr: learning rate before any rule.
        steps: updates of the run.
        groups: prompts of a step.
        size: samples of a prompt.
        every: steps between two measurements.
        prompts: held-out prompts of a measurement on the way.
        final_prompts: held-out prompts of the last one.
    """

    algorithm: str
    settings: tuple[str, ...]
    staleness: int
    seed: int
    rule: str = "own"
    lr: float = 1e-4
    steps: int = 150
    groups: int = 32
    size: int = 8
    every: int = 5
    prompts: int = 256
    final_prompts: int = 1024

    @classmethod
    def of(cls, line: dict[str, Any]) -> Cell:
        """The cell of a line of results."""
        values = {field.name: line[field.name] for field in fields(cls)}
        return cls(**values | {"settings": tuple(values["settings"])})

    @property
    def key(self) -> str:
        """Equal for equal cells."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def label(self) -> str:
        """For people."""
        rule = "" if self.rule == "own" else f" lr {self.rule}"
        return f"{self.algorithm}{rule}, staleness {self.staleness}, seed {self.seed}"


def grid(args: argparse.Namespace) -> list[Cell]:
    """All cells that the command line asks for, the most telling ones first.

    Those are the ends of the scale, the presets before the others, one seed after the other. on_policy is no algorithm
    for old samples: it has the cell of staleness 0 alone, and the same settings at any other are `naive`.
    """
    cells = [
        Cell(
            algorithm=name,
            settings=(*ALGORITHMS[name], *args.set),
            staleness=staleness,
            seed=seed,
            rule=rule,
            lr=args.lr,
            steps=args.steps,
            groups=args.groups * args.size if name in SINGLE else args.groups,
            size=1 if name in SINGLE else args.size,
            every=args.every,
            prompts=args.prompts,
            final_prompts=args.final_prompts,
        )
        for name in args.algorithms
        for staleness in args.staleness
        for rule in args.rules
        for seed in args.seeds
        if name != "on_policy" or staleness == 0
    ]
    ends = {min(args.staleness), max(args.staleness)}
    return sorted(
        cells,
        key=lambda cell: (cell.staleness not in ends, cell.seed, cell.algorithm not in FIRST, -cell.staleness),
    )
