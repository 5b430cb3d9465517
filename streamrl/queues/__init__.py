"""Redis: connection, embedded server, ledger, leases. Knows nothing of models or rewards.

The names below are loaded when they are first used, so that a light import does not pay for redis-py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.queues.leases import Leases as Leases
    from streamrl.queues.ledger import Lease as Lease
    from streamrl.queues.ledger import Ledger as Ledger
    from streamrl.queues.ledgers import Ledgers as Ledgers
    from streamrl.queues.ledgers import open_ledgers as open_ledgers
    from streamrl.queues.role import Role as Role
    from streamrl.queues.role import open_role as open_role

_HOME = {
    "Lease": "ledger",
    "Leases": "leases",
    "Ledger": "ledger",
    "Ledgers": "ledgers",
    "Role": "role",
    "open_ledgers": "ledgers",
    "open_role": "role",
}
__all__ = ["Lease", "Leases", "Ledger", "Ledgers", "Role", "open_ledgers", "open_role"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
