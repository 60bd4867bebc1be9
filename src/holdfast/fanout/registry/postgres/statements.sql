-- name: register
-- $1 gateway, $2 connections, $3 devices max, $4 highest time given, $5 the time for tests
SELECT holdfast_cluster.registry_register_2($1, $2, $3, $4, $5)

-- name: unregister
-- $1 gateway, $2 connections, $3 highest time given, $4 the time for tests
SELECT holdfast_cluster.registry_unregister_1($1, $2, $3, $4)

-- name: renew
-- $1 gateway, $2 life in microseconds, $3 highest time given, $4 the time for tests. No record: node records are in
-- holdfast_chats.node, and older nodes still call this function with one.
SELECT holdfast_cluster.registry_renew_1($1, NULL, $2, $3, $4)

-- name: drop
-- $1 gateway; null: those that are dead, $2 life in microseconds, $3 highest time given, $4 the time for tests
SELECT holdfast_cluster.registry_drop_1($1, $2, $3, $4)

-- name: connections
-- $1 gateway
SELECT tenant, user_id, device_id, connection_id, since FROM holdfast_cluster.device WHERE gateway = $1

-- name: lookup
-- $1 tenants, $2 users
SELECT DISTINCT gateway, tenant, user_id
FROM unnest($1::text[], $2::text[]) AS asked (tenant, user_id) JOIN holdfast_cluster.device USING (tenant, user_id)
