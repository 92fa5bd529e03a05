/** The turns of a conversation, as immutable lists; kept in this tab until it closes. */

import { newAnswer } from "./answer.js";
import { keep, kept } from "./store.js";

const STORE = "tightwire.conversation";

/**
 * @typedef {{role: "user", text: string}} Question
 * @typedef {{role: "assistant", versions: import("./answer.js").Answer[], shown: number}} Reply
 * @typedef {(Question | Reply)[]} Turns
 */

/** The version of a reply that is shown. @param {Reply} reply */
export const shownOf = (reply) => reply.versions[reply.shown];

/** Add a question and the place for its answer. @param {Turns} turns @returns {Turns} */
export const ask = (turns, text) => [
  ...turns,
  { role: "user", text },
  { role: "assistant", versions: [newAnswer()], shown: 0 },
];

/** Ask a changed question in place of the one at `index`; what followed it is dropped. @param {Turns} turns */
export const edit = (turns, index, text) => ask(turns.slice(0, index), text);

/** One more version of the last answer. @param {Turns} turns @returns {Turns} */
export function again(turns) {
  const last = turns.at(-1);
  const versions = [...last.versions, newAnswer()];
  return [...turns.slice(0, -1), { ...last, versions, shown: versions.length - 1 }];
}

/** Replace the newest version of the last answer. @param {Turns} turns @returns {Turns} */
export function withAnswer(turns, answer) {
  const last = turns.at(-1);
  return [...turns.slice(0, -1), { ...last, versions: [...last.versions.slice(0, -1), answer] }];
}

/** @param {Turns} turns @param {number} index of a reply @param {number} shown */
export const showVersion = (turns, index, shown) =>
  turns.map((turn, place) => (place === index ? { ...turn, shown } : turn));

/** The messages before the last reply, as the API takes them. @param {Turns} turns */
export function toMessages(turns, system) {
  const said = turns.slice(0, -1).map((turn) =>
    turn.role === "user" ? { role: "user", content: turn.text } : { role: "assistant", content: shownOf(turn).text },
  );
  const kept = said.filter((message) => message.role === "user" || message.content);
  return system.trim() ? [{ role: "system", content: system }, ...kept] : kept;
}

/** The turns that were kept. An answer that was not complete has stopped. @returns {Turns} */
export function loadTurns() {
  const ended = (answer) => (["waiting", "streaming"].includes(answer.state) ? { ...answer, state: "stopped" } : answer);
  try {
    const turns = JSON.parse(kept(STORE)) ?? [];
    return turns.map((turn) => (turn.role === "user" ? turn : { ...turn, versions: turn.versions.map(ended) }));
  } catch {
    return [];
  }
}

export const saveTurns = (turns) => keep(STORE, JSON.stringify(turns));
