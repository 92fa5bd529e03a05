/** The server as a page sees it: its health, models and AllReduce policies, read again when they may have changed. */

import { useEffect, useState } from "../vendor/htm-preact.js";
import { ApiError, getJson, send } from "./api.js";

const POLL_MS = 3000;
const GONE = { status: "gone", reason: "the server does not answer" };

/**
 * @typedef {object} Server
 * @property {?{status: string, reason: string}} health null before the first answer; status "gone": no answer
 * @property {string} refusal why a ready server takes no requests, such as that another node does; empty: it takes them
 * @property {string[]} models
 * @property {number} contextTokens the longest prompt and answer together
 * @property {?object} comm what GET /comm says; null before the server is ready
 */

/** @returns {Promise<{status: string, reason: string}>} */
export async function readHealth() {
  try {
    return await (await send("/health", { signal: AbortSignal.timeout(10_000) })).json();
  } catch {
    return GONE;
  }
}

/**
 * Poll the health; read models and policies when the server becomes ready, and when `version` changes.
 * @returns {Server}
 */
export function useServer(version) {
  const [health, setHealth] = useState(null);
  const [facts, setFacts] = useState({ models: [], contextTokens: 0, comm: null });
  const isReady = health?.status === "ready";

  useEffect(() => {
    let timer;
    const poll = async () => {
      const now = await readHealth();
      setHealth((before) => (before?.status === now.status && before?.reason === now.reason ? before : now));
      timer = setTimeout(poll, POLL_MS);
    };
    poll();
    return () => clearTimeout(timer);
  }, []);

  useEffect(() => {
    if (isReady) readFacts().then((read) => read && setFacts(read));
  }, [isReady, version]);

  return { health, refusal: (isReady && health.reason) || "", ...facts };
}

async function readFacts() {
  try {
    const [models, comm] = await Promise.all([getJson("/v1/models"), getJson("/comm")]);
    return { models: models.data.map((card) => card.id), contextTokens: models.data[0].max_model_len, comm };
  } catch (error) {
    if (error instanceof ApiError) return null; // a missing key asks for itself, and the health shows the rest
    throw error;
  }
}

/** @param {Server} server */
export const takesRequests = (server) => server.health?.status === "ready" && !server.refusal;

/** The names of the policies that a request may choose, the server's own first. @param {?object} comm */
export const policiesOf = (comm) => (comm ? [ownPolicy(comm), ...Object.keys(comm.extra)] : []);

/** The name of the server's own policy, without what changes it for generated tokens. */
export const ownPolicy = (comm) => comm.algorithm.split("+")[0];
