"""Which servers a replica has, and how the engine of each is made."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.engine import StreamingEngine
from streamrl.errors import ConfigError
from streamrl.producers.engines.model import stop_tokens
from streamrl.producers.group.group import EngineGroup, ServerSpec
from streamrl.queues.registry import Enlisted

_NO_NAME: Final = re.compile("[^A-Za-z0-9._-]+")


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def life_seed(seed: int, name: str, life: int | str) -> int:
    """A sampling seed below 2**63 for one life of a replica or of a server; `life` is any text of its own.

    No two lives draw the same numbers: a group whose samples come from both must not hold one response twice.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{life}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Fleet:
    """Assigns servers to a replica (the role `rollout.N`), and makes their engines.

    Each life of each server gets a seed made from `seed`; logs of servers that are started go to `run_dir`.
    """

    def __init__(self, config: RunConfig, seed: int, run_dir: Path, replica: str) -> None:
        self._config = config
        self._seed = seed
        self._run_dir = run_dir
        self._replica = replica
        index = replica.rpartition(".")[2]
        self._index = int(index) if index.isdecimal() else 0

    def wanted(self, enlisted: Mapping[str, Enlisted]) -> list[str]:
        """Names of the servers of this replica.

        Servers of the configuration go to the replicas in turn, and so do those that were added (`enlisted`); a server
        belongs to one replica, which brings it its weights.
        """
        replicas, engine = self._config.rollout.replicas, self._config.engine
        own = list(engine.url[self._index :: replicas])
        if not engine.url:
            own = [f"{self._replica}.server{number}" for number in range(engine.servers)]
        own = [name for name in own if name not in enlisted or enlisted[name].present]
        added = [
            name
            for name, entry in enlisted.items()
            if entry.present and is_url(name) and name not in engine.url and entry.owner(replicas) == self._index
        ]
        return own + added

    def group(self, enlisted: Mapping[str, Enlisted]) -> EngineGroup:
        servers = [self.spec(name) for name in self.wanted(enlisted)]
        return EngineGroup(self._config, servers, stop_tokens_of(self._config.model.path))

    def spec(self, name: str) -> ServerSpec:
        lives = itertools.count()

        def make() -> StreamingEngine:
            from streamrl.producers.group.server import ServerEngine
            from streamrl.servers.kinds import make_dialect
            from streamrl.servers.process import ManagedServer, ServerSettings

            dialect = make_dialect(self._config)
            adapters = self._run_dir / "adapters" / f"{self._replica}.{_NO_NAME.sub('_', name)}"
            if is_url(name):
                return ServerEngine(dialect, self._config, url=name, adapters=adapters)
            settings = ServerSettings.of_engine(self._config)
            seed = life_seed(self._seed, name, next(lives))
            server = ManagedServer(dialect, settings, self._run_dir, name, self._devices(name), seed=seed)
            return ServerEngine(dialect, self._config, server=server, adapters=adapters)

        return ServerSpec(name, make, ours=not is_url(name))

    def _devices(self, name: str) -> str:
        devices = self._config.engine.devices
        if not devices:
            return ""
        number = int(name.rpartition("server")[2])
        return devices[(self._index * self._config.engine.servers + number) % len(devices)]


def stop_tokens_of(model: str) -> frozenset[int]:
    """Tokens that end a response of a model: those of its generation configuration, else of its configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model {model!r} cannot be read: {error}", "model.path names a Hugging Face directory"
        ) from error
    try:
        generation = transformers.GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        generation = None
    return stop_tokens(generation, config)
