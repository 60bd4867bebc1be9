"""What the adapters of one technology share; no part's tables, keys or rules are here.

- ``files``          durable replacement of files, and where the state directory is
- ``statements``     reads SQL from the files beside an adapter
- ``sqlite``         files, threads, errors, backups of SQLite
- ``postgres``       connections that are sessions; refuses poolers that share them
- ``postgres_database``  a database for small adapters: a pool, translated errors
- ``postgres_schema``  the schema of what nodes share: migrations of each adapter
- ``cluster``        the engines that nodes share, by URL (pure)
- ``redis_url``      addresses of Redis, alone or behind Sentinel (pure)
- ``redis``          connections, reasons of failure, fitness to keep our state
- ``redis_subscription``  the messages of one channel
- ``redis_scripts``  script calls over one pipelined connection
- ``outbound_http``  HTTP to untrusted servers, with bounds on every answer
- ``streamed_http``  HTTP for long streamed answers of one server, with bounds too
"""
