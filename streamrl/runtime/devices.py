"""Which cards of a host each process of a run sees: learner ranks, engines, servers of reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamrl.config import RunConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE as REWARD_MODEL
from streamrl.errors import ConfigError
from streamrl.runtime.plan import processes
from streamrl.servers.environments import computes_on_cpu


def plan_devices(config: RunConfig, cards: Sequence[str], name: str = "") -> dict[str, tuple[str, ...]]:
    """The cards of every process that computes on one, all on one host with these `cards`.

    The learner has the first ones, a card for each rank; each server as many as `engine.tensor_parallel`, after the
    learner's, or, colocated, from the first on; then each server of a reward model one. `devices` and `cuda:N` of the
    run file win, and servers that they name may share a card, but not with the learner, unless colocated. `name` is of
    a member that was added to the run. `ConfigError`: there are too few.
    """
    if not cards:
        return {}
    counts = processes(config)
    kind, _, index = name.rpartition(".")
    if kind in counts:
        counts[kind] = max(counts[kind], int(index) + 1)
    colocated = config.rollout.placement == "colocated"
    plan: dict[str, tuple[str, ...]] = {}
    free = list(cards)
    if "learner" in counts and not computes_on_cpu(config.learner.device):
        plan |= _deal("learner", counts["learner"], 1, free, named=_named(config.learner.device, cards), cards=cards)
        free = list(cards) if colocated else free
    learner = {card for taken in plan.values() for card in taken}
    engine = config.engine
    kind = "engine" if config.engines else "rollout"
    if kind in counts and not engine.url and not computes_on_cpu(engine.device):
        named = engine.devices or _named(engine.device, cards)
        plan |= _deal(kind, counts[kind], engine.tensor_parallel, free, named=named, cards=cards)
    for model in config.reward_servers:
        kind, settings = f"{REWARD_MODEL}.{model}", config.reward_models[model]
        shared = list(cards) if colocated and settings.sleep else free
        plan |= _deal(kind, counts[kind], 1, shared, named=settings.devices, cards=cards)
    for process, taken in plan.items():
        if not colocated and not process.startswith("learner.") and (both := learner.intersection(taken)):
            raise ConfigError(
                f"{process} and the learner would both have card {min(both)}",
                "name other cards, or set rollout.placement to colocated, so that they take turns",
            )
    return plan


def show_devices(plan: Mapping[str, Sequence[str]], cards: Sequence[str]) -> str:
    shown = [f"{name}: {'+'.join(taken)}" for name, taken in plan.items()]
    return f"{', '.join(shown) or 'CPU'} (this host has {len(cards)} cards)"


def _deal(
    kind: str, count: int, each: int, free: list[str], *, named: Sequence[str], cards: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """So many cards for each of `count` processes: those that are named in turn, else of the `free` ones, taken out."""
    dealt = {}
    for index in range(count):
        if named:
            taken = tuple(named[index % len(named)].split(","))
            free[:] = [card for card in free if card not in taken]
        else:
            taken = tuple(free[:each])
            del free[:each]
        if len(taken) < each or not set(taken) <= set(cards):
            wanted = f"card {'+'.join(taken)}" if named else f"{each} of its own"
            raise ConfigError(
                f"this host has the cards {', '.join(cards)}, and {kind}.{index} needs {wanted}",
                "start fewer ranks or servers, name their devices, set a device to cpu, or let engines and learner take"
                " turns (rollout.placement: colocated)",
            )
        dealt[f"{kind}.{index}"] = taken
    if kind == "learner" and count > len({card for taken in dealt.values() for card in taken}):
        raise ConfigError(f"{count} ranks of the learner would share a card", "set learner.device to cuda")
    return dealt


def _named(device: str, cards: Sequence[str]) -> tuple[str, ...]:
    """The card of `cuda:N`: its number among those that a process sees."""
    number = device.partition(":")[2]
    return () if not number else (cards[int(number)] if int(number) < len(cards) else device,)
