"""Workers share the tests of engines by the server that these need: a real server takes half a minute to start."""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

KINDS = {"hf", "vllm", "sglang"}
TOGETHER = ("tests/engines/", "tests/test_hosts.py", "tests/runtime/test_ray.py")
LONG = (
    *("tests/test_", "tests/chaos/", "tests/cli/test_background", "tests/cli/test_engines_check", "tests/cli/test_up"),
    *("tests/consumers/test_math_hostile", "tests/learner/test_training_options", "tests/producers/episodes/adapters/"),
    *("tests/queues/test_memory", "tests/runtime/test_slurm"),
)


class ByServer(LoadScopeScheduling):
    """Tests of engines stay together by the kind of server in their parameters, the others of these by their file.

    Those of several hosts and of Ray stay together as well, because this machine has its networks and ports once. Every
    other test is a scope of its own. The largest scopes come first, then tests of half a minute: short tests fill the
    end, and no worker is idle for long.
    """

    def _split_scope(self, nodeid: str) -> str:
        if not nodeid.startswith(TOGETHER):
            return nodeid
        file, _, params = nodeid.partition("[")
        kinds = [word for word in re.split(r"[-\]]", params) if word in KINDS]
        return kinds[0] if kinds else file.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        queue = self.workqueue
        queue.move_to_end(max(queue, key=lambda scope: (len(queue[scope]), scope.startswith(LONG))), last=False)
        super()._assign_work_unit(node)
