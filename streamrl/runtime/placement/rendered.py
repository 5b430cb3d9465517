"""What all placements have in common that are files for another engine: Kubernetes, Slurm, Docker Compose."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.queues.access import redact


def shared_settings(config: RunConfig) -> dict[str, str]:
    """Values of a run whose roles have hosts of their own."""
    everywhere = "0.0.0.0"  # noqa: S104 (other hosts fetch weights, and call replicas)
    return {
        "weights.transport": "http",
        "weights.host": everywhere,
        **({"engine.host": everywhere} if config.engine.managed else {}),
    }


def expect_portable(config: RunConfig, engine: str) -> None:
    """Raise ConfigError if roles of the run must share a host, or its files would show a password."""
    url = config.redis.url or ""
    if urlsplit(url).password or "password" in parse_qs(urlsplit(url).query):
        raise ConfigError(
            f"redis.url {redact(url)} has a password, which everybody could read in the files",
            "put it into a file, and name that with redis.password_file",
        )
    if config.rollout.placement == "colocated":
        raise ConfigError(
            f"rollout.placement colocated shares the devices of one host, and {engine} gives each role its own",
            "set rollout.placement: standalone",
        )


def lead(config: RunConfig) -> str:
    """The role that keeps checkpoints and serves weights; the run ends when it does."""
    return "recorder" if config.recording.mode == "write" else "learner"


def server_image(config: RunConfig) -> str:
    """The target of deploy/Dockerfile with all servers that the run starts: the checks before the start look at all."""
    kinds: set[str] = {config.engine.kind} if config.engine.managed else set()
    kinds |= {config.reward_models[name].kind for name in config.reward_servers}
    if len(kinds) > 1:
        raise ConfigError(
            f"the run starts servers of {' and '.join(sorted(kinds))}, and an image has those of one kind",
            "start the others yourself, and set engine.url or reward_models.NAME.url",
        )
    return f"streamrl-{kinds.pop()}" if kinds else "streamrl-train"


def drain_seconds(config: RunConfig) -> int:
    """From SIGTERM to SIGKILL."""
    return round(config.supervisor.drain_deadline + config.supervisor.term_grace)


def redis_script(config: RunConfig, password_file: str) -> str:
    """Shell of the run's own Redis, with its data in /data.

    The password comes on standard input, so that no argument has it. A tail that a crash tore inside a script is cut
    off first: Redis would apply half of that script at the start after this one.
    """
    return f"""manifest=/data/appendonlydir/appendonly.aof.manifest
[ ! -e "$manifest" ] || echo y | redis-check-aof --fix "$manifest"
line=$(sed -n '1s/[\\\\"]/\\\\&/g; 1s/..*/requirepass "&"/p' {password_file})
[ -n "$line" ]
exec redis-server - --appendonly yes --appendfsync everysec --save "" --maxmemory-policy noeviction --dir /data \\
  --maxmemory {config.redis.maxmemory} <<END
$line
END
"""


def below(folder: Path, path: str) -> str:
    """A model as a container finds it whose working directory is `folder`; names of a hub stay as they are."""
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path


def as_yaml(document: Any) -> str:
    """Long text in lines, and no anchors."""
    import yaml

    class Plain(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Plain.add_representer(str, text)
    apart = orjson.loads(orjson.dumps(document))  # what occurs twice would get an anchor
    return yaml.dump(apart, Dumper=Plain, sort_keys=False, width=120)
