"""A run as a file of Docker Compose: the processes of the plan as containers of one host.

```
prepare: checks the run file, publishes the run, ends
   v
feeder-0, rollout-N, reward-N, learner (all ranks), reward-model-NAME-N     each `streamrl run ROLE --run /runs/current`
```
Docker restarts what fails. SIGTERM is the drain. The volume `runs` has the run directory, so weights are files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from streamrl.config import RunConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.runtime.placement.rendered import as_yaml, drain_seconds, expect_portable, redis_script, server_image
from streamrl.runtime.plan import processes, threads

FILE: Final = "compose.yaml"
RUN_DIR: Final = "/runs/current"
_SECRET: Final = "redis-password"  # noqa: S105  (the name of a file)
_PASSWORD: Final = f"/run/secrets/{_SECRET}"
_NET: Final = "reward-net"

Service = dict[str, Any]


def render(config: RunConfig, run_file: Path, folder: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The file by its name in `folder`; `overrides` are those of `--set`, with which `config` was read.

    ConfigError: the run needs what containers do not share, or servers of two kinds.
    """
    expect_portable(config, "Docker Compose")
    role = _role(config, os.path.relpath(run_file.parent, folder))
    services = {} if config.redis.url is not None else {"redis": _redis(config)}
    services["prepare"] = _prepare(config, run_file.name, overrides, role)
    if _shares_network(config):
        services[_NET] = _network_of_rewards(config)
    for kind, count in processes(config).items():
        if kind == "learner":
            services[kind] = _learner(config, count, role)
        else:
            name = kind.replace(".", "-").replace("_", "-")
            services |= {f"{name}-{index}": _member(config, kind, index, role) for index in range(count)}
    document = {
        "name": re.sub(r"[^a-z0-9_-]", "-", f"streamrl-{config.name.lower()}"),
        "services": services,
        "volumes": {"runs": {}} if config.redis.url is not None else {"runs": {}, "redis": {}},
        "secrets": {_SECRET: {"file": f"./secrets/{_SECRET}"}},
    }
    return {
        FILE: f"# Written by `streamrl render compose {run_file.name}` (guide: Docker Compose).\n{as_yaml(document)}"
    }


def _role(config: RunConfig, work: str) -> Service:
    """What all roles have, the checks before the start too: they check what the roles will see."""
    return {
        "image": server_image(config),
        "volumes": [f"{work}:/work:ro", "runs:/runs"],
        "secrets": [_SECRET],
        **({"gpus": "all"} if any(wanted.gpus for wanted in config.cluster.resources.values()) else {}),
    }


def _words(words: Sequence[str]) -> list[str]:
    """A dollar would begin a variable of Compose."""
    return [word.replace("$", "$$") for word in words]


def _prepare(config: RunConfig, run_file: str, overrides: Sequence[str], role: Service) -> Service:
    settings = {"redis.password_file": _PASSWORD, "weights.transport": "directory"}
    if config.engine.managed:
        settings["engine.host"] = "0.0.0.0"  # noqa: S104 (the address of a container)
    if config.redis.url is None:
        settings["redis.url"] = "redis://redis:6379/0"
    items = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
    words = [word for item in items for word in ("--set", item)]
    waits = {"depends_on": {"redis": {"condition": "service_healthy"}}} if config.redis.url is None else {}
    return {
        **role,
        "command": _words(["up", f"/work/{run_file}", "--run", RUN_DIR, "--prepare", *words]),
        "restart": "no",
        **waits,
    }


def _process(config: RunConfig, kind: str, role: Service) -> Service:
    wanted = config.resources(kind.partition(".")[0])
    return {
        **role,
        "environment": threads(config, kind, cluster=True),
        **({"cpus": wanted.cpus} if wanted.cpus else {}),
        # NCCL, and the processes of one server, talk in shared memory, of which Docker gives 64 MiB.
        **({"shm_size": "8g"} if kind in {"learner", "engine"} else {}),
        "restart": f"on-failure:{config.supervisor.max_restarts}",
        "stop_grace_period": f"{drain_seconds(config)}s",
        "depends_on": {"prepare": {"condition": "service_completed_successfully"}},
    }


def _member(config: RunConfig, kind: str, index: int, role: Service) -> Service:
    name, _, model = kind.partition(".")
    words = ["run", name, "--run", RUN_DIR, "--index", str(index), *(["--model", model] if model else [])]
    service = {**_process(config, kind, role), "command": words}
    if name in {"reward", REWARD_MODEL_ROLE} and _shares_network(config):
        service["network_mode"] = f"service:{_NET}"
    return service


def _learner(config: RunConfig, ranks: int, role: Service) -> Service:
    """All ranks in one container: when one fails, all start again from the checkpoint."""
    service = _process(config, "learner", role)
    if ranks == 1:
        return {**service, "command": ["run", "learner", "--run", RUN_DIR]}
    if "cpus" in service:
        service["cpus"] *= ranks  # each rank asks for so many
    service["environment"] |= {"WORLD_SIZE": str(ranks), "STREAMRL_RENDEZVOUS": "tcp://127.0.0.1:29400"}
    return {**service, "entrypoint": ["bash", "-uc", *_words([gang(ranks)])]}


def gang(ranks: int) -> str:
    """Run all ranks; the first that fails ends the script, and the container with it. SIGTERM goes to all of them."""
    return f"""declare -A left
trap 'kill -TERM "${{!left[@]}}"' TERM
for rank in $(seq 0 {ranks - 1}); do
  RANK=$rank LOCAL_RANK=$rank streamrl run learner --run {RUN_DIR} --index "$rank" &
  left[$!]=$rank
done
# Looks once a second: `wait -n` may miss the end of a rank on a busy machine.
while ((${{#left[@]}})); do
  for pid in "${{!left[@]}}"; do
    kill -0 "$pid" 2> /dev/null && continue
    unset "left[$pid]"
    wait "$pid" || exit $?
  done
  sleep 1 & wait $!
done
"""


def _shares_network(config: RunConfig) -> bool:
    return bool(config.reward_servers)


def _network_of_rewards(config: RunConfig) -> Service:
    """The network of reward workers and of the servers that listen on the loopback interface alone.

    A service that ends and comes back would take its network with it, so this one does nothing, for ever.
    """
    return {
        "image": server_image(config),
        "entrypoint": ["sleep", "infinity"],
        "init": True,
        "restart": "always",
    }


def _redis(config: RunConfig) -> Service:
    ping = f"REDISCLI_AUTH=$(cat {_PASSWORD}) redis-cli ping | grep -q PONG"
    return {
        "image": "redis:7.2-alpine",
        "command": ["sh", "-euc", *_words([redis_script(config, _PASSWORD)])],
        "volumes": ["redis:/data"],
        "secrets": [_SECRET],
        "restart": "always",
        "healthcheck": {"test": ["CMD-SHELL", *_words([ping])], "interval": "2s", "retries": 30},
    }
