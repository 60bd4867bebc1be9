"""A shop that must not lose an order: FastAPI, PostgreSQL and ``holdfast.work`` as a
library.

    pip install 'holdfast[postgres]' fastapi uvicorn
    DATABASE_URL=postgresql://localhost/shop uvicorn service:app

- ``POST /orders`` writes the order and the job in one transaction: there is no order
  without its job, and no job without its order.
- ``POST /payments/{id}`` is called by a payment provider, perhaps twice: the inbox
  stores it once.
- Shipping calls a carrier that is sometimes unavailable: it is retried, in the order of
  the customer's orders, and booked once per order even if the run is repeated.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
from fastapi import FastAPI, HTTPException, Request

from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import Stage
from holdfast.work.outbox import enqueue, received
from holdfast.work.postgres import PostgresWork
from holdfast.work.worker import Worker

TABLES = """
CREATE TABLE IF NOT EXISTS orders
    (id text PRIMARY KEY, customer text NOT NULL, state text NOT NULL);
CREATE TABLE IF NOT EXISTS ledger
    (id bigserial PRIMARY KEY, order_id text NOT NULL, entry text NOT NULL);
"""
BOOKED = Stage.USER
"""A stage of our own: the carrier has the parcel."""


class OrderPlaced(msgspec.Struct):
    order_id: str
    customer: str


class Paid(msgspec.Struct):
    order_id: str
    cents: int


class Carrier:
    """An external system. ``key`` lets it recognise a repetition."""

    async def book(self, order_id: str, key: int) -> None: ...


handlers = Handlers()
carrier = Carrier()


@handlers.handle(OrderPlaced, stream=lambda placed: placed.customer)
async def ship(ctx: Context, placed: OrderPlaced) -> None:
    await ctx.step(BOOKED, lambda: carrier.book(placed.order_id, ctx.key))
    async with ctx.transaction() as connection:
        await connection.execute(
            "UPDATE orders SET state = 'shipped' WHERE id = $1", placed.order_id
        )
        await connection.execute(
            "INSERT INTO ledger (order_id, entry) VALUES ($1, 'shipped')", placed.order_id
        )


@handlers.handle(Paid, stream=lambda paid: paid.order_id)
async def book_payment(ctx: Context, paid: Paid) -> None:
    async with ctx.transaction() as connection:
        entry = f"paid {paid.cents}"
        await connection.execute(
            "INSERT INTO ledger (order_id, entry) VALUES ($1, $2)", paid.order_id, entry
        )


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    url = os.environ["DATABASE_URL"]
    store = await PostgresWork.open(url)
    async with asyncpg.create_pool(url) as pool:
        await pool.execute(TABLES)
        app.state.pool, app.state.jobs = pool, store
        async with Worker(store, handlers, name="orders").running():
            yield
    await store.close()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(request: Request) -> dict[str, Any]:
    body = await request.json()
    placed = OrderPlaced(body["order_id"], body["customer"])
    try:
        async with request.app.state.pool.acquire() as connection, connection.transaction():
            await connection.execute(
                "INSERT INTO orders VALUES ($1, $2, 'placed')", placed.order_id, placed.customer
            )
            (job,) = await enqueue(connection, handlers.draft(placed))
    except asyncpg.UniqueViolationError:
        raise HTTPException(409, "there is an order with this id") from None
    return {"order_id": placed.order_id, "job": job}


@app.post("/payments/{payment_id}")
async def payment(payment_id: str, request: Request) -> dict[str, bool]:
    body = await request.json()
    draft = handlers.draft(Paid(body["order_id"], body["cents"]))
    async with request.app.state.pool.acquire() as connection, connection.transaction():
        return {"new": await received(connection, "payments", payment_id, draft)}


@app.get("/orders/{order_id}")
async def get_order(order_id: str, request: Request) -> dict[str, Any]:
    ledger = "SELECT entry FROM ledger WHERE order_id = orders.id ORDER BY ledger.id"
    # as of one moment
    order = f"SELECT customer, state, ARRAY({ledger}) AS ledger FROM orders WHERE id = $1"
    row = await request.app.state.pool.fetchrow(order, order_id)
    if row is None:
        raise HTTPException(404)
    return dict(row)
