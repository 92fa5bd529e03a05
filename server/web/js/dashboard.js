/** The dashboard: load, latencies and communication, read once a second and kept for ten minutes. */

import { html, render, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { ApiError, getJson, request } from "./api.js";
import { Chart } from "./chart.js";
import { CostTable, Policies, Ranks } from "./comm_tables.js";
import { count, percent, rate, seconds } from "./format.js";
import { Header } from "./header.js";
import { History, read } from "./history.js";
import { KeyPrompt } from "./key.js";
import { readHealth } from "./server.js";

const POLL_MS = 1000;
const PATIENCE_MS = 5000; // for one answer

/** Title, series as [name in the history, label], how to show a value, the axis' lowest end. */
const CHARTS = [
  ["Sequences", [["running", "running"], ["waiting", "waiting"]], count, 4],
  ["Tokens a second", [["tokenRate", "generated"], ["promptRate", "prompt"]], rate, 10],
  ["Time to first token", [["first50", "p50"], ["first95", "p95"]], seconds, 0.01],
  ["Between tokens", [["inter50", "p50"], ["inter95", "p95"]], seconds, 0.01],
  ["KV cache", [["kv", "in use"]], percent, 1],
  ["Communication", [["commShare", "of rank 0's time"]], percent, 1],
];

function Dashboard() {
  const [history] = useState(() => new History());
  const [state, setState] = useState({ health: null, comm: null, model: "" });
  const poll = useRef(null);

  useEffect(() => {
    let timer;
    let model = "";
    let locked = false; // until a key is given, what needs one is not asked for again
    poll.current = () => (locked = false);
    const run = async () => {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const [health, metrics] = await Promise.all([readHealth(), orError(textOf("/metrics", signal))]);
      if (!["ready", "draining"].includes(health.status)) model = ""; // another server may come, with another model
      const comm = locked || !["ready", "draining"].includes(health.status) ? null : await orError(commOf(signal, model));
      locked ||= comm instanceof ApiError && comm.status === 401;
      if (comm?.model) model = comm.model;
      const now = Date.now() / 1000;
      if (typeof metrics === "string") history.add(read(metrics, now));
      else history.addGap(now);
      setState((before) => ({ health, model, comm: comm?.facts ?? before.comm }));
      timer = setTimeout(run, POLL_MS);
    };
    run();
    return () => clearTimeout(timer);
  }, []);

  return html`
    <${Header} page="/dashboard" model=${state.model} health=${state.health} />
    <main id="main" tabindex="-1" class="board">
      <h1 class="hidden">Dashboard</h1>
      <${Notice} health=${state.health} />
      <${Tiles} history=${history} />
      <section class="charts" aria-label="Last ten minutes">
        ${CHARTS.map(([title, series, show, top]) => html`
          <${Chart} title=${title} names=${series.map(([, label]) => label)} columns=${history.columns(series.map(([name]) => name))} show=${show} top=${top} />`)}
      </section>
      ${state.comm ? html`<${Comm} comm=${state.comm} history=${history} />` : html`<p class="note">Ranks and policies appear when the server is ready${"\u00a0"}and, with --api-key, knows you.</p>`}
    </main>
    <${KeyPrompt} onKey=${() => poll.current()} />
  `;
}

/** The result, or the ApiError. */
async function orError(promise) {
  try {
    return await promise;
  } catch (error) {
    return error instanceof ApiError ? error : new ApiError(0, String(error));
  }
}

const textOf = async (path, signal) => (await request(path, { signal })).text();

async function commOf(signal, model) {
  const facts = await getJson("/comm", { signal });
  return { facts, model: model || (await getJson("/v1/models", { signal })).data[0].id };
}

function Notice({ health }) {
  if (!health || health.status === "ready") return null;
  const gone = health.status === "gone";
  return html`<p class="notice" role="alert">${gone ? "The server does not answer. The page goes on asking, and keeps what it has." : `The server takes no requests (${health.status})${health.reason && `: ${health.reason}`}`}</p>`;
}

function Tiles({ history }) {
  const { latest, newest } = history;
  const done = newest?.outcomes ?? {};
  const finished = (done.stop ?? 0) + (done.length ?? 0);
  const hits = newest?.prefixQueries ? newest.prefixHits / newest.prefixQueries : null;
  const tiles = [
    ["Running", count(latest.running), `${count(latest.waiting)} waiting`],
    ["Tokens/s", rate(latest.tokenRate), `${rate(latest.promptRate)} of prompts`],
    ["First token, p50", seconds(latest.first50), `p95 ${seconds(latest.first95)}, over 30 s`],
    ["Between tokens, p50", seconds(latest.inter50), `p95 ${seconds(latest.inter95)}, over 30 s`],
    ["KV cache", percent(latest.kv), `${percent(hits)} of prompts cached`],
    ["Communication", percent(latest.commShare), "of rank 0's time, over 30 s"],
    ...(newest?.drafts ? [["Drafted tokens right", `${count(newest.accepted)} of ${count(newest.drafted)}`, draftsOf(newest)]] : []),
    ["Finished", count(newest && finished), `${count(done.cancelled)} cancelled, ${count(done.error)} failed, ${count(done.refused)} refused`],
  ];
  return html`
    <dl class="tiles">
      ${tiles.map(([name, value, more]) => html`<div><dt>${name}</dt><dd class="value">${value}</dd><dd class="more">${more}</dd></div>`)}
    </dl>
  `;
}

/** What drafts brought since start. */
function draftsOf({ draftLength, tokensPerSum }) {
  const sums = tokensPerSum === null || tokensPerSum === undefined ? "no sums" : `${tokensPerSum.toFixed(4)} tokens a sum`;
  return `${draftLength.toFixed(2)} a draft, ${sums}`;
}

function Comm({ comm, history }) {
  return html`
    <section class="card"><h2>Communication by algorithm <span class="about">on rank 0, over the last 30 s</span></h2><${CostTable} growth=${history.commGrowth()} comm=${comm} /></section>
    <div class="pair">
      <section class="card"><h2>Ranks and links</h2><${Ranks} comm=${comm} /></section>
      <section class="card"><h2>AllReduce policy</h2><${Policies} comm=${comm} /></section>
    </div>
  `;
}

render(html`<${Dashboard} />`, document.getElementById("app"));
