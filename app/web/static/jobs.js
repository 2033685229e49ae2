// Submits work to Holdfast and waits for it: the answer at once, or a job that is polled to its end.
//
//   import { submitAndWait } from "/static/jobs.js";
//   const answer = await submitAndWait("/api/trace/events", ask, { onProgress: show });
//   answer.results.history.data        // all rows, whichever way they came
//
// No dependencies. Works in pages and wherever there are fetch and streams.

const FINAL = new Set(["completed", "completed_with_errors", "failed", "cancelled"]);
const LIMIT = 5000;
const TRIES = 5; // of a request that had no answer at all

/**
 * What went wrong: `code` is the stable word of the API, `status` that of HTTP (0: no answer).
 * `job` is there where the job itself ended badly.
 */
export class JobError extends Error {
  constructor(code, message, { status = 0, errors = [], job = null } = {}) {
    super(message);
    this.name = "JobError";
    Object.assign(this, { code, status, errors, job });
  }
}

/**
 * POST `body` and return what came of it, in the same shape for an answer at once and for a job.
 *
 * @param {string} url
 * @param {object} body
 * @param {object} [options]
 * @param {(job: object) => void} [options.onProgress] called with the job at each look at it
 * @param {number} [options.pollInterval] milliseconds between two looks, 3000
 * @param {number} [options.patienceSeconds] how long it may run; waiting in the queue not counted
 * @param {AbortSignal} [options.signal]
 * @param {Record<string, string>} [options.headers] such as Authorization
 * @param {(domain: string, rows: object[]) => void} [options.onRows] take the rows of a trace as
 *   they come; the answer then has their counts only
 * @returns {Promise<object>} a trace: {results: {<domain>: {data, count}}, quality, job}; a batch:
 *   {items, job}
 */
export async function submitAndWait(url, body, options = {}) {
  const headers = { "Content-Type": "application/json", ...options.headers };
  const init = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await ask(url, init, options);
  const accepted = await answer.json();
  if (answer.status !== 202) return { ...handOver(accepted, options), job: null };
  const job = await waitForJob(accepted.status_url, options);
  return { ...(await readResult(accepted.result_url, job, options)), job };
}

/** Look at a job until it is final, and return it. Throws JobError where it failed. */
export async function waitForJob(statusUrl, options = {}) {
  const { onProgress, pollInterval = 3000, patienceSeconds = 1800, signal } = options;
  for (;;) {
    const answer = await ask(statusUrl, { headers: options.headers }, options);
    const job = await answer.json();
    onProgress?.(job);
    if (FINAL.has(job.state)) return endOf(job);
    const seen = Date.parse(answer.headers.get("Date") ?? "") || Date.now();
    if (job.started_at && seen - Date.parse(job.started_at) > patienceSeconds * 1000) {
      throw new JobError("patience_over", `still running after ${patienceSeconds} s`, { job });
    }
    await pause(pollInterval, signal);
  }
}

/** Cancel a job; what is done of it is kept. */
export async function cancelJob(job, options = {}) {
  const init = { method: "POST", headers: options.headers };
  return (await ask(job.links.cancel, init, options)).json();
}

/** Read all rows of one domain of a trace, page by page; throws rather than return fewer. */
export async function readRows(resultUrl, domain, options = {}) {
  const rows = [];
  for (let offset = 0; offset !== null; ) {
    const query = new URLSearchParams({ domain, offset, limit: LIMIT });
    const answer = await ask(`${resultUrl}?${query}`, { headers: options.headers }, options);
    const page = await answer.json();
    if (page.count !== page.data.length) throw short(domain, page.data.length, page.count);
    rows.push(...page.data);
    offset = page.next;
    if (offset === null && rows.length !== page.total) throw short(domain, rows.length, page.total);
  }
  return rows;
}

/** Read a whole trace as a stream, `onRows(domain, rows)` for each piece; returns counts. */
export async function streamRows(resultUrl, onRows, options = {}) {
  const headers = { ...options.headers, Accept: "application/x-ndjson" };
  const answer = await ask(resultUrl, { headers }, options);
  const counts = {};
  let domain = null;
  let rows = [];
  let whole = null;
  const flush = () => {
    if (rows.length) onRows(domain, rows);
    rows = [];
  };
  for await (const line of linesOf(answer.body)) {
    const value = JSON.parse(line);
    if (!("_" in value)) {
      rows.push(value);
      counts[domain] += 1;
      if (rows.length === LIMIT) flush();
      continue;
    }
    flush();
    if (value._ === "domain_start") counts[(domain = value.domain)] = 0;
    if (value._ === "domain_end" && counts[domain] !== value.count) {
      throw short(domain, counts[domain], value.count);
    }
    if (value._ === "error") throw new JobError(value.code, value.message, { status: 200 });
    if (value._ === "complete") whole = value;
  }
  if (!whole) throw new JobError("stream_cut", "the stream ended before it was complete");
  return { counts, quality: whole.quality };
}

// ---- the two shapes of a result -----------------------------------------------------------------

function handOver(answer, { onRows }) {
  if (!onRows || !answer.results) return answer;
  for (const [domain, found] of Object.entries(answer.results)) {
    onRows(domain, found.data);
    delete found.data;
  }
  return answer;
}

async function readResult(resultUrl, job, options) {
  if (job.kind !== "trace") return { items: await readItems(resultUrl, options) };
  const results = {};
  if (options.onRows) {
    const { counts, quality } = await streamRows(resultUrl, options.onRows, options);
    for (const [domain, count] of Object.entries(counts)) results[domain] = { count };
    return { results, quality };
  }
  const manifest = await (await ask(resultUrl, { headers: options.headers }, options)).json();
  for (const domain of Object.keys(manifest.domains)) {
    const data = await readRows(resultUrl, domain, options);
    results[domain] = { data, count: data.length };
  }
  return { results, quality: manifest.quality };
}

async function readItems(resultUrl, options) {
  const items = [];
  for (;;) {
    const query = new URLSearchParams({ offset: items.length, limit: LIMIT });
    const answer = await ask(`${resultUrl}?${query}`, { headers: options.headers }, options);
    const page = await answer.json();
    items.push(...page.items);
    if (items.length >= page.total) return items;
    if (!page.items.length) throw short("items", items.length, page.total);
  }
}

function endOf(job) {
  if (job.state !== "failed") return job;
  const [first] = job.errors;
  const why = first ? `${first.error_class}: ${first.sample}` : "nothing of it could be done";
  throw new JobError("job_failed", why, { job });
}

function short(what, came, promised) {
  return new JobError("rows_missing", `${came} of ${promised} came of ${what}`);
}

// ---- asking -------------------------------------------------------------------------------------

/** Ask until there is an answer: "later" (429, 503) is heeded, and silence is asked again. */
async function ask(url, init, { signal, pollInterval = 3000, patienceSeconds = 1800 }) {
  const began = Date.now();
  for (let tries = 1; ; tries += 1) {
    const answer = await attempt(url, { credentials: "same-origin", ...init, signal });
    if (answer?.ok) return answer;
    const isLater = !answer || answer.status === 429 || answer.status === 503;
    const wait = retryAfter(answer) ?? pollInterval * tries;
    const isTooLong = Date.now() + wait - began > patienceSeconds * 1000;
    if (!isLater || isTooLong || (!answer && tries >= TRIES)) throw await problemOf(answer);
    await pause(wait, signal);
  }
}

async function attempt(url, init) {
  try {
    return await fetch(url, init);
  } catch (error) {
    if (init.signal?.aborted || error.name === "AbortError") throw error;
    return null;
  }
}

function retryAfter(answer) {
  const value = answer?.headers.get("Retry-After");
  return /^\d+$/.test(value ?? "") ? Number(value) * 1000 : null;
}

async function problemOf(answer) {
  if (!answer) return new JobError("no_answer", "the server did not answer");
  const problem = await answer.json().catch(() => ({}));
  const { code = "http_error", detail = answer.statusText, errors } = problem;
  return new JobError(code, detail, { status: answer.status, errors });
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(finish, milliseconds);
    signal?.addEventListener("abort", finish);
    function finish() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", finish);
      if (signal?.aborted) reject(signal.reason);
      else resolve();
    }
  });
}

async function* linesOf(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const lines = rest.split("\n");
      rest = lines.pop();
      yield* lines;
      if (done) break;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new JobError("stream_cut", "the stream was cut before it was complete");
  } finally {
    reader.releaseLock();
  }
  if (rest) yield rest;
}
