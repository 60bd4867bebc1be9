-- Version 5: a membership knows whether another user's token made it: such ones fill at most half of a user's chats.
-- Of those from before nobody knows; they count as made by the backend.

ALTER TABLE members ADD COLUMN invited INTEGER NOT NULL DEFAULT 0;
CREATE INDEX members_by_invitation ON members (tenant, user_id) WHERE invited;
