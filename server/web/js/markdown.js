/** Draws the Markdown that models write, as elements and text, so no markup of an answer is ever parsed as HTML. */

import { html } from "../vendor/htm-preact.js";
import { Copy } from "./copy.js";

const FENCE = /^(\s*)(~{3,}|`{3,}(?![^`]*`))\s*([^\s`]*)/; // with a later backtick it is code in a line of text
const HEADING = /^(#{1,4})\s+(.*)/s; // s: a line may hold a carriage return or a Unicode line separator
const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)/s;
const QUOTE = /^>\s?(.*)/s;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*(?!\s)([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/(?:[^\s()]|\([^\s()]*\))+)\)/g;

/** @param {string} text */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = blockAt(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

/** The block that begins at a line, and the line after it. */
function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return codeAt(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [html`<p class="heading" role="heading" aria-level=${heading[1].length + 2}>${inline(heading[2])}</p>`, at + 1];
  if (ITEM.test(line)) return listAt(lines, at);
  const end = endOf(lines, at, QUOTE.test(line) ? (next) => QUOTE.test(next) : isText);
  if (QUOTE.test(line)) {
    return [html`<blockquote>${inline(lines.slice(at, end).map((quoted) => QUOTE.exec(quoted)[1]).join("\n"))}</blockquote>`, end];
  }
  return [html`<p>${inline(lines.slice(at, end).join("\n"))}</p>`, end];
}

const isText = (line) => line.trim() && ![FENCE, HEADING, ITEM, QUOTE].some((kind) => kind.test(line));

/** The first line after `at` that does not belong. */
function endOf(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end])) end++;
  return end;
}

function codeAt(lines, at) {
  const [, indent, fence, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.startsWith(fence) && !line.replaceAll(fence[0], "");
  const end = endOf(lines, at, (line) => !closes(line.trim())); // a streamed text may not have the last fence yet
  const code = lines.slice(at + 1, end).map((line) => line.replace(new RegExp(`^\\s{0,${indent.length}}`), "")).join("\n");
  const name = language || "code";
  const block = html`<div class="code">
    <div class="head"><span>${name}</span><${Copy} text=${code} /></div>
    <pre tabindex="0" aria-label=${`${name} block`}><code>${code}</code></pre>
  </div>`;
  return [block, end + 1];
}

function listAt(lines, at) {
  const end = endOf(lines, at, (line) => ITEM.test(line) || (/^\s{2,}\S/.test(line) && !FENCE.test(line)));
  const items = [];
  for (const line of lines.slice(at, end)) {
    const item = ITEM.exec(line);
    if (item) items.push([item[2]]);
    else items.at(-1).push(line.trim());
  }
  const drawn = items.map((item) => html`<li>${inline(item.join("\n"))}</li>`);
  const number = ITEM.exec(lines[at])[1];
  const room = { paddingLeft: `max(1.5em, ${String(Number(number) + items.length).length + 1}ch)` }; // or long numbers are cut
  return [number ? html`<ol start=${number} style=${room}>${drawn}</ol>` : html`<ul>${drawn}</ul>`, end];
}

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(at, found.index), span(found));
    at = found.index + found[0].length;
  }
  return [...parts, text.slice(at)];
}

function span([, , code, bold, italic, label, url]) {
  if (code) return html`<code>${code}</code>`;
  if (bold) return html`<strong>${inline(bold)}</strong>`;
  if (italic) return html`<em>${italic}</em>`;
  return html`<a href=${url} target="_blank" rel="noreferrer noopener">${label}</a>`;
}
