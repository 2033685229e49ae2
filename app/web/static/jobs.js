// Submits work to Holdfast and waits for it: the answer at once, or a job that is polled to its end.
//
//   import { submitAndWait } from "/static/jobs.js";
//   const answer = await submitAndWait("/api/trace/events", ask, { onProgress: show });
//   answer.results.history.data        // all rows, whichever way they came
//
// No dependencies. Works in pages and wherever there are fetch and streams.

const FINAL = new Set(["completed", "completed_with_errors", "failed", "cancelled"]);
const LIMIT = 5000;
const TRIES = 5; // of a request that had no answer at all, or only a part of one
const OURS = { "X-Requested-With": "XMLHttpRequest" }; // a page of another site cannot send it

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
  const headers = {
    "Content-Type": "application/json",
    "Idempotency-Key": newKey(), // sent again, it is still the same job
    ...OURS,
    ...options.headers,
  };
  const init = { method: "POST", headers, body: JSON.stringify(body) };
  const { answer, value } = await askJson(url, init, options);
  if (answer.status === 202) {
    const job = await waitForJob(value.status_url, options);
    return { ...(await readResult(value.result_url, job, options)), job };
  }
  const jobUrl = answer.headers.get("Location"); // of a job that was waited for
  const job = jobUrl ? await waitForJob(jobUrl, options) : null;
  if (!value.items) return { ...handOver(value, options), job };
  return { items: await readItems(`${jobUrl}/result`, options, value), job };
}

/** Look at a job until it is final, and return it. Throws JobError where it failed. */
export async function waitForJob(statusUrl, options = {}) {
  const { onProgress, pollInterval = 3000, patienceSeconds = 1800, signal } = options;
  for (;;) {
    const { answer, value: job } = await askJson(statusUrl, { headers: options.headers }, options);
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
  const init = { method: "POST", headers: { ...OURS, ...options.headers } };
  return (await askJson(job.links.cancel, init, options)).value;
}

/** Read all rows of one domain of a trace, page by page; throws rather than return fewer. */
export async function readRows(resultUrl, domain, options = {}) {
  const rows = [];
  for (let offset = 0; offset !== null; ) {
    const query = new URLSearchParams({ domain, offset, limit: LIMIT });
    const page = await readPage(resultUrl, query, options);
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
  const { answer } = await ask(resultUrl, { headers }, options);
  const counts = {};
  let domain = null;
  let rows = [];
  let isOpen = false;
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
    if (value._ === "error") throw new JobError(value.code, value.message, { status: 200 });
    if (isOpen !== (value._ === "domain_end")) {
      throw new JobError("rows_missing", `the rows of ${domain} have no end`);
    }
    isOpen = value._ === "domain_start";
    if (isOpen) counts[(domain = value.domain)] = 0;
    if (value._ === "domain_end" && counts[domain] !== value.count) {
      throw short(domain, counts[domain], value.count);
    }
    if (value._ === "complete") whole = value;
  }
  if (!whole) throw new JobError("stream_cut", "the stream ended before it was complete");
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  if (total !== whole.rows) throw short("the stream", total, whole.rows);
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
  const manifest = await readPage(resultUrl, null, options);
  for (const domain of Object.keys(manifest.domains)) {
    const data = await readRows(resultUrl, domain, options);
    results[domain] = { data, count: data.length };
  }
  return { results, quality: manifest.quality };
}

async function readItems(resultUrl, options, first = null) {
  const items = [];
  for (let page = first; ; page = null) {
    const query = new URLSearchParams({ offset: items.length, limit: LIMIT });
    page ??= await readPage(resultUrl, query, options);
    items.push(...page.items);
    if (items.length >= page.total) return items;
    if (!page.items.length) throw short("items", items.length, page.total);
  }
}

async function readPage(resultUrl, query, options) {
  const init = { headers: options.headers };
  return (await askJson(query ? `${resultUrl}?${query}` : resultUrl, init, options)).value;
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

/** Ask until there is an answer: "later" is heeded, and silence is asked again. */
async function ask(url, init, options, read = () => null) {
  const { signal, pollInterval = 3000, patienceSeconds = 1800 } = options;
  const began = Date.now();
  for (let tries = 1; ; tries += 1) {
    const found = await attempt(url, { credentials: "same-origin", ...init, signal }, read);
    if (found?.answer.ok) return found;
    const wait = retryAfter(found) ?? pollInterval * tries;
    const isTooLong = Date.now() + wait - began > patienceSeconds * 1000;
    if (!isLater(found) || isTooLong || (!found && tries >= TRIES)) throw problemOf(found);
    await pause(wait, signal);
  }
}

const askJson = (url, init, options) => ask(url, init, options, (answer) => answer.json());

async function attempt(url, init, read) {
  try {
    const answer = await fetch(url, init);
    return { answer, value: answer.ok ? await read(answer) : await problem(answer) };
  } catch (error) {
    if (init.signal?.aborted || error.name === "AbortError") throw error;
    return null; // no answer, or one that was cut
  }
}

function isLater(found) {
  if (!found || found.answer.status === 429 || found.answer.status === 503) return true;
  return found.value.code === "idempotency_in_progress";
}

function retryAfter(found) {
  const value = found?.answer.headers.get("Retry-After");
  return /^\d+$/.test(value ?? "") ? Number(value) * 1000 : null;
}

const problem = (answer) => answer.json().catch(() => ({}));

function problemOf(found) {
  if (!found) return new JobError("no_answer", "the server did not answer, or not to the end");
  const { code = "http_error", detail = found.answer.statusText, errors } = found.value;
  return new JobError(code, detail, { status: found.answer.status, errors });
}

function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is there under TLS only
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
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
