-- Version 11: halted chats are listed without a look at all chats.

CREATE INDEX chats_halted ON chats (chat_id) WHERE halted IS NOT NULL;
