"""Silences of alerts that hold on every node of a cluster. A single node keeps its own
in ``alerts.json``.

- ``contract``  what a store of silences promises
- ``postgres``  in the database of a cluster
"""

from holdfast.webhooks.silences.contract import SharedSilences

__all__ = ["SharedSilences"]
