/** The last ten minutes of /metrics as series to draw: gauges, rates, and quantiles over a sliding window. */

import { histogramOf, parseMetrics, quantile, valueOf } from "./prometheus.js";

const KEPT_S = 600;
const WINDOW_S = 30; // of quantiles and shares
const RATE_S = 5; // of rates

/**
 * @typedef {object} Reading the numbers of one scrape
 * @property {number} time in seconds
 * @property {Map<string, {op: string, algorithm: string, phase: string, seconds: number, calls: number, bytes: number, exact: number}>} comm
 */

/** @param {string} text of /metrics @param {number} time in seconds @returns {Reading} */
export function read(text, time) {
  const samples = parseMetrics(text);
  const value = (name) => valueOf(samples, `tightwire_${name}`);
  const outcomes = (samples.get("tightwire_requests_total") ?? []).map(({ labels, value }) => [labels.outcome, value]);
  return {
    time,
    running: value("requests_running"),
    waiting: value("requests_waiting"),
    kv: value("kv_cache_usage_ratio"),
    steps: value("engine_steps_total"),
    promptTokens: value("prompt_tokens_total"),
    tokens: value("generation_tokens_total"),
    prefixQueries: value("prefix_cache_queries_total"),
    prefixHits: value("prefix_cache_hits_total"),
    drafts: value("drafts_total"),
    drafted: value("draft_tokens_total"),
    accepted: value("accepted_draft_tokens_total"),
    draftLength: value("draft_mean_length"),
    tokensPerSum: value("tokens_per_sum"),
    outcomes: Object.fromEntries(outcomes),
    firstToken: histogramOf(samples, "tightwire_time_to_first_token_seconds"),
    interToken: histogramOf(samples, "tightwire_inter_token_latency_seconds"),
    comm: commOf(samples),
  };
}

const COMM_FIELDS = { seconds_sum: "seconds", seconds_count: "calls", bytes_total: "bytes", exact_bytes_total: "exact" };

function commOf(samples) {
  const kinds = new Map();
  for (const [name, field] of Object.entries(COMM_FIELDS)) {
    for (const { labels, value } of samples.get(`tightwire_comm_${name}`) ?? []) {
      const key = `${labels.op}|${labels.algorithm}|${labels.phase}`;
      if (!kinds.has(key)) kinds.set(key, { ...labels, seconds: 0, calls: 0, bytes: 0, exact: 0 });
      kinds.get(key)[field] = value;
    }
  }
  return kinds;
}

/** The time of collectives that steps wait for: gathering partitioned layers runs beside them. */
const commSeconds = ({ comm }) => [...comm.values()].filter(({ phase }) => phase !== "weights").reduce((sum, { seconds }) => sum + seconds, 0);

export class History {
  constructor() {
    this._points = [];
    this._readings = []; // of the window, oldest first
  }

  /** @param {Reading} reading */
  add(reading) {
    if (reading.steps < (this.newest?.steps ?? 0)) this._readings = []; // the server was started again
    const [oldest] = this._readings;
    const previous = this._readings.findLast(({ time }) => time <= reading.time - RATE_S) ?? oldest;
    this._readings.push(reading);
    while (this._readings[0].time < reading.time - WINDOW_S) this._readings.shift();
    this._push(reading.time, { running: reading.running, waiting: reading.waiting, kv: reading.kv, ...derive(reading, previous, oldest) });
  }

  /** The server did not answer: a gap in every series. */
  addGap(time) {
    this._readings = [];
    this._push(time, {});
  }

  /** @returns {Reading | undefined} */
  get newest() {
    return this._readings.at(-1);
  }

  /** The newest value of each series. */
  get latest() {
    return this._points.at(-1)?.values ?? {};
  }

  /** Columns for a chart: the times, then each series. @param {string[]} names */
  columns(names) {
    const series = names.map((name) => this._points.map(({ values }) => values[name] ?? null));
    return [this._points.map(({ time }) => time), ...series];
  }

  /** How the collectives of each kind grew over the window, most time first. */
  commGrowth() {
    const [oldest] = this._readings;
    if (!oldest || oldest === this.newest) return [];
    const seconds = this.newest.time - oldest.time;
    const rows = [...this.newest.comm].map(([key, now]) => {
      const before = oldest.comm.get(key) ?? { seconds: 0, calls: 0, bytes: 0, exact: 0 };
      return {
        key, op: now.op, algorithm: now.algorithm, phase: now.phase,
        share: Math.min(1, (now.seconds - before.seconds) / seconds),
        callRate: (now.calls - before.calls) / seconds,
        byteRate: (now.bytes - before.bytes) / seconds,
        saved: now.exact > 0 ? 1 - now.bytes / now.exact : 0,
      };
    });
    return rows.sort((a, b) => b.share - a.share);
  }

  _push(time, values) {
    this._points.push({ time, values });
    while (this._points[0].time < time - KEPT_S) this._points.shift();
  }
}

/** Rates since `previous`, quantiles and shares since the oldest reading of the window. */
function derive(now, previous, oldest) {
  if (!previous) return {};
  const elapsedS = now.time - previous.time;
  const windowS = now.time - oldest.time;
  return {
    tokenRate: (now.tokens - previous.tokens) / elapsedS,
    promptRate: (now.promptTokens - previous.promptTokens) / elapsedS,
    first50: quantile(now.firstToken, oldest.firstToken, 0.5),
    first95: quantile(now.firstToken, oldest.firstToken, 0.95),
    inter50: quantile(now.interToken, oldest.interToken, 0.5),
    inter95: quantile(now.interToken, oldest.interToken, 0.95),
    commShare: Math.min(1, (commSeconds(now) - commSeconds(oldest)) / windowS), // readings may be late
  };
}
