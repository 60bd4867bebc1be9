CREATE TABLE holdfast_cluster.endpoint (
    endpoint_id text COLLATE "C" PRIMARY KEY,
    tenant      text COLLATE "C" NOT NULL,
    url         text             NOT NULL,
    secret      text             NOT NULL,
    description text             NOT NULL,
    created_at  text COLLATE "C" NOT NULL,
    disabled    text             NOT NULL,
    disabled_at text COLLATE "C" NOT NULL
);

-- The last deliveries of each endpoint.
CREATE TABLE holdfast_cluster.delivery (
    number      bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id text COLLATE "C" NOT NULL,
    webhook_id  text             NOT NULL,
    chat_id     text             NOT NULL,
    sequence    bigint           NOT NULL,
    attempt     integer          NOT NULL,
    at          text             NOT NULL,
    status      integer          NOT NULL,
    seconds     float8           NOT NULL,
    error       text             NOT NULL
);
CREATE INDEX delivery_by_endpoint ON holdfast_cluster.delivery (endpoint_id, number);

-- Endpoints that were here: their jobs are over. A job of an endpoint that never was here is not.
CREATE TABLE holdfast_cluster.removed_endpoint (endpoint_id text COLLATE "C" PRIMARY KEY);

-- Whose endpoints these are: one name for the whole cluster. The version rises with every change of endpoints.
CREATE TABLE holdfast_cluster.endpoint_head (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    server  text    NOT NULL,
    version bigint  NOT NULL
);
INSERT INTO holdfast_cluster.endpoint_head VALUES (true, replace(gen_random_uuid()::text, '-', ''), 1);
