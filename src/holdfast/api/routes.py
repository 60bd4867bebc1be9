"""The table of every endpoint and page; the operators' part is ``operator_routes``.

``app``, ``/openapi.json``, ``/docs`` and docs/reference/rest.md are built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.api import chats, completions, limits, messages, probes, replies
from holdfast.api.deps import PresenceView
from holdfast.api.endpoint import Endpoint, StreamBounds, WebPage
from holdfast.api.openapi import openapi_json
from holdfast.api.operator_routes import (
    ADMIN,
    ANY_REPLIES,
    CUT_OFF,
    DEAD_LETTERS,
    JOBS,
    RULES,
    WEBHOOKS,
)
from holdfast.api.reference import STYLE, html_page
from holdfast.api.reply_calls import reserve_body
from holdfast.api.reply_schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    DeletedResponse,
    EventsQuery,
    ModelList,
    ModelView,
    NewReply,
    ReplyStart,
    ResponseQuery,
    ResponseRequest,
    ResponseView,
)
from holdfast.api.schemas import (
    BanList,
    ChangeAnswer,
    ChatDetail,
    ChatsQuery,
    DeliveryStatus,
    Health,
    MemberList,
    MessagePage,
    MessagesQuery,
    NewChat,
    NewMember,
    NewMessage,
    NewRole,
    NewToken,
    OneUser,
    Renamed,
    TokenAnswer,
)
from holdfast.bounds import MIB
from holdfast.store.contract import UNREAD_LOOKED_AT, ChatPage
from holdfast.wire.frames import ErrorBody, MessageAck

CHAT = "/v1/chats/{chat_id}"
MEMBER = CHAT + "/members/{user_id:path}"
MESSAGE = CHAT + "/messages/{sequence}"

CHATS: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chats", chats.create_chat, "Create a chat", "user", "chats:create",
        body=NewChat, answer=ChangeAnswer, status=201, key="optional",
        also={200: "It exists: the pair has a direct chat already, or this key was used before."},
        note="The caller becomes the owner of a group; the two members of a direct chat are "
        "equal.",
    ),
    Endpoint(
        "GET", "/v1/chats", chats.list_chats, "List one's chats, newest activity first", "user",
        "chats:read", query=ChatsQuery, answer=ChatPage,
        note="With display title, own role, last message and `unread`: how many texts of others, "
        f"neither redacted nor erased, are past what the user has read. The {UNREAD_LOOKED_AT} "
        "newest messages of a chat are looked at; where older ones may be unread too, "
        "`unread_capped` is true and there are at least that many.",
    ),
    Endpoint(
        "GET", CHAT, chats.get_chat, "One chat with its members", "user", "chats:read",
        answer=ChatDetail,
    ),
    Endpoint(
        "PATCH", CHAT, chats.rename_chat, "Rename a chat", "user", "chats:members", body=Renamed,
        answer=ChangeAnswer,
    ),
    Endpoint(
        "GET", CHAT + "/members", chats.list_members, "List the members", "user", "chats:read",
        answer=MemberList,
    ),
    Endpoint(
        "POST", CHAT + "/members", chats.add_member, "Add a member", "user", "chats:members",
        body=NewMember, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "PATCH", MEMBER, chats.change_role, "Change a member's role", "user", "chats:members",
        body=NewRole, answer=ChangeAnswer,
    ),
    Endpoint(
        "DELETE", MEMBER, chats.remove_member, "Remove a member, or leave", "user", "chats:send",
        answer=ChangeAnswer,
        note="Removing oneself is leaving; removing somebody else needs the scope chats:members. "
        "A former member cannot read the history.",
    ),
    Endpoint(
        "GET", CHAT + "/bans", chats.list_bans, "Who is banned from the chat", "user", "chats:read",
        answer=BanList,
        note="And who is muted in it, those who have left included. For its owners and admins.",
    ),
    Endpoint(
        "POST", CHAT + "/bans", chats.ban_user, "Ban somebody from the chat", "user",
        "chats:members", body=OneUser, answer=ChangeAnswer, key="optional",
        note="A member is removed; nobody can add them again until the ban is lifted. By an "
        "admin, and only an owner bans an admin; an owner cannot be banned.",
    ),
    Endpoint(
        "DELETE", CHAT + "/bans/{user_id:path}", chats.unban_user, "Lift a ban", "user",
        "chats:members", answer=ChangeAnswer,
        note="They are not added by it. 404 if there is no such ban.",
    ),
    Endpoint(
        "POST", CHAT + "/mutes", chats.mute_member, "Mute a member", "user", "chats:send",
        body=OneUser, answer=ChangeAnswer, key="optional",
        note="A muted member reads; sends, names and new members are refused (403 FORBIDDEN) "
        "until that is lifted, also after leaving and coming back. By an admin, and only an owner "
        "mutes an admin; an owner cannot be muted. In a direct chat each member may mute the "
        "other, which declines the chat.",
    ),
    Endpoint(
        "DELETE", CHAT + "/mutes/{user_id:path}", chats.unmute_member, "Lift a mute", "user",
        "chats:send", answer=ChangeAnswer,
        note="By whoever may mute, also of somebody who has left. 404 if they are not muted.",
    ),
    Endpoint(
        "GET", CHAT + "/presence", chats.get_presence, "Who of the members is online", "user",
        "chats:read", answer=PresenceView,
    ),
)  # fmt: skip

MESSAGES: Sequence[Endpoint] = (
    Endpoint(
        "GET", CHAT + "/messages", messages.list_messages, "Read messages", "user", "chats:read",
        query=MessagesQuery, answer=MessagePage,
        note="Before, after or around a sequence; the newest if none is given. A page ends at its "
        "limit or at 256 KiB, whichever is first.",
    ),
    Endpoint(
        "POST", CHAT + "/messages", messages.send_message, "Send a message", "user", "chats:send",
        body=NewMessage, answer=MessageAck, status=201, key="required",
        on_refused=messages.count_refused_send,
        also={200: "It was stored before under the same key: `deduplicated` is true."},
        note="The Idempotency-Key is the client_message_id. The answer comes after the commit on "
        "stable storage.",
    ),
    Endpoint(
        "DELETE", MESSAGE, messages.redact_message, "Redact a message", "user", "chats:send",
        answer=ChangeAnswer,
        note="The content is deleted for good; the sequence and the key stay. By its sender or an "
        "admin of the chat.",
    ),
    Endpoint(
        "GET", MESSAGE + "/status", messages.get_status, "Who has a message and who has read it",
        "user", "chats:read", answer=DeliveryStatus,
        note="For its sender.",
    ),
    Endpoint(
        "POST", "/v1/tokens", chats.mint_token, "Mint a user token", "tenant", "tokens:write",
        body=NewToken, answer=TokenAnswer, status=201,
    ),
    Endpoint(
        "GET", "/v1/ws", probes.upgrade_needed, "The WebSocket", "anybody", answer=ErrorBody,
        status=426,
        note="Speaks the protocol `holdfast.v1`; a request without an upgrade gets 426.",
    ),
)  # fmt: skip

STREAMED: Mapping[str, Any] = {"stream": StreamBounds(), "deadline_seconds": 3600.0}
"""A reply's own clocks end it long before that deadline."""
STARTS_REPLY: Mapping[str, Any] = {
    **STREAMED,
    "raw": True,
    "body_bytes_max": 4 * MIB,
    "body_seconds_max": 30.0,
    "reserve": reserve_body,
    "entry_point": "reply",
    "headers": ("Prefer",),
    "key": "optional",
    "errors": frozenset({404, 502, 504}),
}
RESPONSE = "/v1/responses/{reply_id}"
PREFER = "`Prefer: wait=N` bounds the wait in the queue to N seconds. `X-Reply-Id` names the reply."

REPLIES: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chat/completions", completions.create_chat_completion,
        "Create a chat completion", "owner", "replies:write", body=ChatCompletionRequest,
        answer=ChatCompletion, error_shape="openai", **STARTS_REPLY,
        note="As OpenAI's API has it; fields not named here go to the provider as they came. "
        f"With an Idempotency-Key the reply can be asked for again. {PREFER}",
    ),
    Endpoint(
        "GET", "/v1/models", completions.list_models, "List the models", "owner", "replies:write",
        answer=ModelList, error_shape="openai",
    ),
    Endpoint(
        "GET", "/v1/models/{model_id:path}", completions.get_model, "One model", "owner",
        "replies:write", answer=ModelView, error_shape="openai",
    ),
    Endpoint(
        "POST", "/v1/responses", completions.create_response, "Create a response", "owner",
        "replies:write", body=ResponseRequest, answer=ResponseView, error_shape="openai",
        **STARTS_REPLY,
        note="Text and function tools. With `background: true` it runs on when nobody reads it. "
        f"Unless `store` is false it can be read again until ten minutes after its end. {PREFER}",
    ),
    Endpoint(
        "GET", RESPONSE, completions.get_response, "Read a response", "owner", "replies:write",
        query=ResponseQuery, answer=ResponseView, error_shape="openai", **STREAMED,
        note="As it is now; with `stream=true` its events, those after `starting_after` only.",
    ),
    Endpoint(
        "POST", RESPONSE + "/cancel", completions.cancel_response, "Cancel a response", "owner",
        "replies:write", answer=ResponseView, error_shape="openai",
        note="A second cancel, or one of a response that has ended, changes nothing.",
    ),
    Endpoint(
        "DELETE", RESPONSE, completions.delete_response, "Delete a response", "owner",
        "replies:write", answer=DeletedResponse, error_shape="openai",
    ),
    Endpoint(
        "POST", "/v1/replies", replies.create_reply, "Start a reply", "owner", "replies:write",
        body=ReplyStart, answer=NewReply, status=201, error_shape="problem", **STARTS_REPLY,
        note="The body is that of a chat completion. Read `events_url`, with EventSource for "
        f"example: it needs no other credential for 30 minutes. {PREFER}",
    ),
    Endpoint(
        "GET", "/v1/replies/{reply_id}/events", replies.read_reply_events,
        "Read a reply's events", "owner", "replies:write", query=EventsQuery,
        media_type="text/event-stream", headers=("Last-Event-ID",), ticket=True,
        error_shape="problem", **STREAMED,
        also={204: "Last-Event-ID is that of the end: there is nothing more."},
        note="`queued`, `delta`, `usage`, `failed`, `done`; all but `queued` have an id, from "
        "which a reader goes on after a disconnect, on any node.",
    ),
    Endpoint(
        "DELETE", "/v1/replies/{reply_id}", replies.cancel_reply, "Cancel a reply", "owner",
        "replies:write", status=204, error_shape="problem",
        note="A second cancel, or one of a reply that has ended, changes nothing.",
    ),
)  # fmt: skip

ALIASES: Mapping[str, str] = {"/healthz": "/health/live", "/readyz": "/health/ready"}
"""Conventional paths of probes -> ours."""

PROBES: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/health/live", probes.get_live, "Whether the process runs", "anybody",
        answer=Health,
    ),
    Endpoint(
        "GET", "/health/ready", probes.get_ready, "Whether this node can serve", "anybody",
        answer=Health, also={503: "It cannot."},
        note="An admin key with status:read gets the state of each dependency.",
    ),
    Endpoint(
        "GET", "/health/admin", limits.get_admin_health, "Whether rules can be changed", "anybody",
        answer=Mapping[str, str], also={503: "They cannot; limiting goes on."},
        errors=frozenset({404}),
        note="Looks once a second at most. An admin key with status:read gets what is unwell; "
        "`rules: stale` comes along while this node does not know whether it has every change.",
    ),
    Endpoint(
        "GET", "/metrics", probes.get_metrics, "Metrics for Prometheus", "operator", "status:read",
        media_type=probes.METRICS_TYPE,
        note="Open to anybody only if the setting `metrics_without_key` says so.",
    ),
)  # fmt: skip

GROUPS: Mapping[str, Sequence[Endpoint]] = {
    "Chats and members": CHATS,
    "Messages and tokens": MESSAGES,
    "AI replies": REPLIES,
    "Operators": ADMIN,
    "Who is cut off": CUT_OFF,
    "Replies and usage, for operators": ANY_REPLIES,
    "Limits": RULES,
    "Dead letters": DEAD_LETTERS,
    "Jobs": JOBS,
    "Webhooks": WEBHOOKS,
    "Probes": PROBES,
}
ENDPOINTS: Sequence[Endpoint] = tuple(row for rows in GROUPS.values() for row in rows)

PAGES: Sequence[WebPage] = (
    WebPage("/openapi.json", "application/json", openapi_json),
    WebPage(
        "/docs", "text/html; charset=utf-8", lambda _: html_page(GROUPS),
        csp="default-src 'none'; style-src 'self'; frame-ancestors 'none'",
    ),
    WebPage("/docs/style.css", "text/css; charset=utf-8", lambda _: STYLE),
)  # fmt: skip
