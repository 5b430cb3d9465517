"""Workers share the tests of engines by the server that these need: a real server takes half a minute to start."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

KINDS = {"hf", "served", "vllm", "sglang"}


class ByServer(LoadScopeScheduling):
    """Tests of one file and one kind of engine stay together, those of all conformance files by their kind.

    Every other test is a scope of its own. xdist begins with the largest scopes, so these small ones fill the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        if not nodeid.startswith("tests/engines/"):
            return nodeid
        file, _, params = nodeid.partition("[")
        kinds = [word for word in re.split(r"[-\]]", params) if word in KINDS]
        return "-".join([file.partition("::")[0].partition("conformance")[0], *kinds[:1]])
