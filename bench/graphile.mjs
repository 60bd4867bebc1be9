// Fills Graphile Worker's queue, drains it with a handler that is awaited, and prints jobs per second.
//
//     node graphile.mjs URL JOBS CONCURRENCY        (beside an installed graphile-worker)

import { Logger, makeWorkerUtils, run } from "graphile-worker";

const [url, jobs, concurrency] = process.argv.slice(2);
const total = Number(jobs);
const shared = { connectionString: url, logger: new Logger(() => () => {}) };

const utils = await makeWorkerUtils(shared);
await utils.migrate();
await utils.withPgClient((client) =>
  client.query("SELECT graphile_worker.add_job('fetch', '{}') FROM generate_series(1, $1)", [total]),
);
await utils.release();
globalThis.gc?.();

let done = 0;
let finished;
const all = new Promise((resolve) => (finished = resolve));
const started = process.hrtime.bigint();
const runner = await run({
  ...shared,
  concurrency: Number(concurrency),
  maxPoolSize: Number(concurrency),
  noHandleSignals: true,
  taskList: {
    fetch: async () => {
      await new Promise(setImmediate);
      if (++done === total) finished();
    },
  },
});
await all;
const seconds = Number(process.hrtime.bigint() - started) / 1e9;
await runner.stop();
console.log(total / seconds);
