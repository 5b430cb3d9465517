"""Role `agent`: leases prompts and runs their episodes, in as many processes as wanted, on any host.

```
prompts -> RolloutWorker -> EpisodeSampler -> Replicas -> HTTP -> rollout.N
```
A process has no engine and no weights. When it dies, others take over its leases and go on from the journals.
"""

from __future__ import annotations

import asyncio

from streamrl.errors import unwrapped
from streamrl.producers.group.replicas import Replicas
from streamrl.producers.tokenizer import Tokenizer
from streamrl.producers.worker import RolloutWorker
from streamrl.queues import Role
from streamrl.waits import first_of
from streamrl.weight_sync.files import read_token


async def run_agent(role: Role) -> None:
    """Run episodes until `role.stop` is set; then those in flight are finished or handed back.

    `ConfigError`: no tokenizer, or no token of the run. `PluginError`: the episode cannot be loaded.
    """
    replicas = Replicas(role.config, role.ledgers, read_token(role.run_dir))
    with unwrapped():
        tokenizer = await asyncio.to_thread(Tokenizer.load, role.config.model)
        worker = RolloutWorker(
            role, replicas, tokenizer, behind=replicas.behind, news=replicas.changed, figures=replicas.figures
        )
        async with replicas.follow():
            await first_of(replicas.first(), role.stop.wait())
            if not role.stop.is_set():
                await worker.run()
