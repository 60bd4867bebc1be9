"""Endpoints and their deliveries in one SQLite file.

- ``store``       the adapter
- ``statements``  its SQL
- ``migrations``  the schema
"""

from holdfast.webhooks.sqlite.store import WEBHOOKS, SqliteEndpoints

__all__ = ["WEBHOOKS", "SqliteEndpoints"]
