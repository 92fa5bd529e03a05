/** Runs one streamed chat completion, and computes what the page shows about it. */

import { ApiError, events, request } from "./api.js";

const UPDATE_MS = 40; // between two drawings of a streamed text

/**
 * @typedef {object} Answer
 * @property {string} text
 * @property {"waiting" | "streaming" | "done" | "stopped" | "failed"} state
 * @property {string} policy the AllReduce policy that was asked for; empty: the server's own
 * @property {string} [error]
 * @property {string} [finish] the finish reason
 * @property {number} [firstS] from sending to the first text, measured in the browser
 * @property {number} [totalS]
 * @property {object} [usage]
 * @property {object} [timing] the server's parts of the time to first token
 * @property {object} [comm] the server's collectives while it answered
 * @property {{prompt_tokens: number, cached: number, computed: number, seconds: number}} [progress] of the prompt
 */

/** @returns {Answer} */
export const newAnswer = (policy = "") => ({ text: "", state: "waiting", policy });

/**
 * Ask, and call `onUpdate` with each new state. Returns the last one; never throws.
 * @param {object} body of the chat completion, without the fields about streaming and measurements
 * @param {{policy: string, signal: AbortSignal, onUpdate: (answer: Answer) => void}} options
 * @returns {Promise<Answer>}
 */
export async function runAnswer(body, { policy, signal, onUpdate }) {
  const start = performance.now();
  const elapsed = () => (performance.now() - start) / 1000;
  let answer = newAnswer(policy);
  let drawn = 0;
  const update = (changes, always) => {
    answer = { ...answer, ...changes };
    if (!always && performance.now() - drawn < UPDATE_MS) return;
    drawn = performance.now();
    onUpdate(answer);
  };
  update({}, true);
  try {
    const wanted = { comm: true, timing: true, progress: true, ...(policy && { allreduce: policy }) };
    const usage = { include_usage: true, continuous_usage_stats: true };
    const full = { ...body, stream: true, stream_options: usage, tightwire: wanted };
    const response = await request("/v1/chat/completions", { body: full, signal });
    for await (const event of events(response)) {
      const changes = changesOf(event, answer, elapsed());
      update(changes, Boolean(changes.progress)); // the next event may be seconds away
    }
    update({ state: "done" }, true);
  } catch (error) {
    if (signal.aborted) update({ state: "stopped" }, true);
    else update({ state: "failed", error: error instanceof ApiError ? error.message : String(error) }, true);
  }
  return answer;
}

/** What an event of the stream adds. ApiError: it is the error that broke the stream. */
function changesOf(event, answer, nowS) {
  if (event.error) throw new ApiError(0, event.error.message);
  const { timing, comm, progress } = event.tightwire ?? {};
  const { usage } = event;
  const changes = {
    ...(timing && { timing }),
    ...(comm && { comm }),
    ...(progress && { progress }),
    ...(usage && { usage }),
  };
  const [choice] = event.choices;
  if (choice?.delta.content) {
    Object.assign(changes, { text: answer.text + choice.delta.content, state: "streaming", totalS: nowS });
    if (answer.firstS == null) changes.firstS = nowS;
  }
  if (choice?.finish_reason) changes.finish = choice.finish_reason;
  return changes;
}

/** Tokens after the first one, by the time they took. @param {Answer} answer @returns {?number} */
export function tokensPerSecond({ usage, firstS, totalS }) {
  const time = totalS - firstS;
  return usage && time > 0 && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / time : null;
}

/**
 * The time to the first token inside the server, in the parts that a choice of AllReduce changes.
 * @param {Answer} answer
 * @returns {?{total: number, parts: {name: string, seconds: ?number, about: string}[]}}
 */
export function splitOfFirstToken({ timing }) {
  if (!timing) return null;
  const { ttft_s: total, compute_s: compute, codec_s: codec, allreduce_s: wire } = timing;
  const other = Math.max(0, total - compute - (codec ?? 0) - wire);
  return {
    total,
    parts: [
      { name: "compute", seconds: compute, about: "forward passes without collectives" },
      { name: "codec", seconds: codec, about: codec == null ? "inside a fused kernel, part of wire" : "encoding and decoding" },
      { name: "wire", seconds: wire, about: "collectives, with waiting for slower ranks" },
      { name: "other", seconds: other, about: "queue, tokenizing, sampling, HTTP" },
    ],
  };
}

/**
 * Bytes that rank 0 sent, by token of the prompt (without cached ones) and by token of the answer.
 * @param {Answer} answer
 * @returns {{prompt: ?number, answer: ?number}}
 */
export function bytesPerToken({ comm, usage }) {
  if (!comm || !usage) return { prompt: null, answer: null };
  const sent = (phase) => comm.counters.filter((c) => c.phase === phase).reduce((sum, c) => sum + c.bytes_sent, 0);
  const computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens;
  const decoded = usage.completion_tokens - 1;
  return { prompt: computed > 0 ? sent("prefill") / computed : null, answer: decoded > 0 ? sent("decode") / decoded : null };
}

/** The algorithms that summed, most bytes first. @param {Answer} answer */
export function algorithmsOf({ comm }) {
  const sums = (comm?.counters ?? []).filter((c) => c.op === "all_reduce");
  return [...new Set(sums.sort((a, b) => b.bytes_sent - a.bytes_sent).map((c) => c.algorithm))];
}
