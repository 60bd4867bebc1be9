-- Version 2: node records; halted chats are listed without a look at all chats. A send changes neither column of the index.

CREATE INDEX chat_halted ON holdfast_chats.chat (chat_id) WHERE halted IS NOT NULL;

-- The nodes; see store/nodes/. Unlogged: after a crash or a failover each writes its own again.
CREATE UNLOGGED TABLE holdfast_chats.node (
    name        text COLLATE "C" PRIMARY KEY,
    renewed_at  timestamptz NOT NULL,
    connections integer NOT NULL,
    record      text NOT NULL
) WITH (fillfactor = 50);
