/** Requests to this server: the tab's API key, JSON, and errors in the server's own words. */

import { keep, kept } from "./store.js";

const KEY = "tightwire.key";

/** An event of `window`: the server refused a request without a key, or with a wrong one. */
export const KEY_NEEDED = "tightwire:key-needed";

export class ApiError extends Error {
  /**
   * @param {number} status of the response; 0: there was none
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Keep the key for this tab. The browser forgets it when the tab closes. */
export const setKey = (key) => keep(KEY, key);

/** True if this tab has a key. A link to a route that needs one cannot send it. */
export const hasKey = () => kept(KEY) !== null;

/**
 * The response, whatever its status. ApiError 0: the server did not answer.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} [options]
 */
export async function send(path, { body, signal } = {}) {
  const key = kept(KEY);
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const content = body && JSON.stringify(body);
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, body: content, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Check that it is still running, then try again.");
  }
}

/** The response of a request that succeeded. ApiError otherwise. */
export async function request(path, options) {
  const response = await send(path, options);
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new Event(KEY_NEEDED));
  throw new ApiError(response.status, await errorText(response));
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `The server answered with status ${response.status}.`;
  }
}

/**
 * The JSON of each server-sent event until [DONE].
 * @param {Response} response
 * @returns {AsyncGenerator<object>}
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await read(reader);
    if (done) throw new ApiError(0, "The connection closed before the answer was complete.");
    const frames = (buffer + value).split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  }
}
