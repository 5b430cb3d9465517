"""The part of the preflight that looks at engines and at the way of the weights; nothing is started."""

from __future__ import annotations

import http
import http.client
import os
import socket
from typing import Final
from urllib.parse import urlsplit

from streamrl.config import EngineConfig, RunConfig
from streamrl.errors import CannotCreate, ConfigError, Unreachable
from streamrl.servers import environments
from streamrl.servers.launch import PLUGIN

_DEADLINE: Final = 10.0
_OWN_FLAGS: Final = frozenset({"port", "host", "model", "model-path", "served-model-name", "api-key", "admin-api-key"})


def look_at_engine(config: RunConfig) -> str:
    """Return what responses are generated with.

    Raises:
        ConfigError: the GPU, the environment or our plug-in is missing, the environment is made for another machine, or
            keys do not fit together.
        Unreachable: a server at `engine.url` does not answer within ten seconds.
    """
    engine = config.engine
    if engine.url:
        return ", ".join(_answers(engine, url) for url in engine.url)
    if engine.kind == "hf":
        return "transformers in the replica's process"
    assert engine.kind != "openai", "the configuration refuses it without a URL"
    return _environment(engine, engine.kind)


def look_at_reward_models(config: RunConfig) -> str:
    """Return which servers answer for which reward model. Those that run already may be down: workers wait for them.

    Raises:
        ConfigError: what is started lacks its environment, or is given flags or a sleep that it cannot have.
    """
    found = []
    for name, model in config.reward_models.items():
        if model.managed:
            from streamrl.servers.reward_models import model_server  # an HTTP client, which few runs need here

            server = model_server(name, model)
            if not server.cpu and environments.computes_on_cpu("auto"):
                raise ConfigError(
                    f"reward_models.{name}: the environment in {server.environment} is made for GPUs, and this machine"
                    " has none",
                    f"{environments.install_command(model.kind)} --cpu --into DIR; name it in reward_models.{name}",
                )
        found.append(f"{name}: {', '.join(model.url) if model.url else f'{model.servers} x {model.kind}'}")
    return "; ".join(found) or "none"


def _environment(engine: EngineConfig, kind: environments.Kind) -> str:
    wants_cpu = environments.on_cpu(engine)
    folder = environments.find_environment(engine.environment, kind)
    taken = sorted({flag.lstrip("-").replace("_", "-") for flag in engine.flags} & _OWN_FLAGS)
    if taken:
        raise ConfigError(
            f"engine.flags sets {', '.join(taken)}, which streamrl chooses for the servers it starts",
            "leave it out; for a server that you start, set engine.url",
        )
    if not (PLUGIN / "streamrl_engine" / f"{kind}.py").is_file():
        raise ConfigError(f"streamrl is installed without its plug-in for {kind} servers", "install streamrl again")
    marker = environments.installed(folder)
    if marker is None:
        return f"{kind} of unknown version in {folder}"
    if marker["cpu"] != wants_cpu:
        made, wanted = ("CPUs", "a GPU") if marker["cpu"] else ("GPUs", "the CPU")
        option = "--cpu" if wants_cpu else "--gpu"
        raise ConfigError(
            f"the {kind} environment in {folder} is made for {made}, this run generates on {wanted}",
            f"{environments.install_command(kind)} {option}, or set engine.environment to another one",
        )
    return f"{kind} {marker['version']} in {folder}, {engine.servers} for each replica"


def _answers(engine: EngineConfig, url: str) -> str:
    """Return the URL when something that speaks HTTP is there and takes the key."""
    from streamrl.http import read_key  # an HTTP client, which takes a while
    from streamrl.servers.kinds import DIALECTS

    parts = urlsplit(url)
    assert parts.hostname, "the configuration refuses other URLs"
    guarded = DIALECTS[engine.kind].guarded
    key = read_key("engine.api_key_file", engine.api_key_file)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_DEADLINE)
    try:
        connection.request("GET", parts.path.rstrip("/") + guarded, headers=headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        hint = f"start it, or leave out engine.url to let streamrl start {engine.kind} servers"
        raise Unreachable(f"no server answers at {url}: {error or type(error).__name__}", hint) from error
    finally:
        connection.close()
    if status in {401, 403}:
        raise ConfigError(f"the server at {url} refuses our key (HTTP {status})", "set engine.api_key_file")
    if status == http.HTTPStatus.NOT_FOUND and engine.kind != "openai":
        raise ConfigError(
            f"the server at {url} is no {engine.kind} server: it has no {guarded}",
            "let engine.kind say what runs there",
        )
    return url


def look_at_way(config: RunConfig) -> str:
    """Return how versions reach the engines.

    Raises:
        ConfigError: this machine cannot use the transport, or the address is not one of this host.
        CannotCreate: the port is taken.
    """
    weights = config.weights
    if weights.pulled:
        _bindable(weights.host, weights.port)
    if weights.relay and weights.transport != "http":
        raise ConfigError(f"weights.relay has no meaning with transport {weights.transport}", "leave it out")
    deltas = f", deltas between every {weights.delta.every}" if weights.delta.enabled else ""
    return f"{weights.transport}, {weights.dtype}{deltas}"


def _bindable(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"weights.host {host} is unknown: {error.strerror}", "name an address of this host"
        ) from error
    except OSError as error:
        raise CannotCreate(
            f"cannot listen on {host} port {port} for the weights: {os.strerror(error.errno or 0)}",
            "set weights.host to an address of this host, and weights.port to a free port or 0",
        ) from error


def shared_memory_copies(config: RunConfig) -> int:
    """Copies of the weights that lie in /dev/shm at the same time, at most, when all replicas run on this host.

    Three where the learner puts its versions (two are kept, or an anchor and its deltas; one is written), two more
    where somebody may still be pulling, and two in the staging folder of each replica that fetches versions or
    completes deltas.
    """
    weights = config.weights
    staging_folders = config.rollout.replicas if weights.pulled or weights.delta.enabled else 0
    return (0 if weights.transport == "directory" else 3) + (2 if weights.pulled else 0) + 2 * staging_folders
