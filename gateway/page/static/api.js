// The gateway's API as this page uses it: like any other client, with the user's key.
import { choice } from "./store.js";
import { language, t } from "./words.js";

/** What went wrong. `status` 0: no answer; -1: the answer broke off. */
export class Failure extends Error {
  constructor(status, { message = "", code = null, after = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.after = after;
  }
}

/** Return what a message keeps of an error. */
export function failure(error) {
  const { status, code, after, message } = error instanceof Failure ? error : new Failure(500, error);
  return { status, code, after, message };
}

function inWords(seconds) {
  const [unit, length] = seconds > 7200 ? ["hour", 3600] : seconds > 120 ? ["minute", 60] : ["second", 1];
  const format = new Intl.NumberFormat(language(), { style: "unit", unit, unitDisplay: "long" });
  return format.format(Math.ceil(seconds / length)); // never less than it is
}

/** Return the words for a failure: what it means, and what the gateway said itself. */
export function explain({ status, code, after, message }) {
  let text = t("failed");
  if (status === 0) text = t("unreachable");
  else if (status === -1) text = t("lost");
  else if (code === "context_length_exceeded") text = t("tooLong");
  else if (code === "unknown_key") text = t("keyUnknown");
  else if (code === "no_model") text = t(choice("key") ? "noneForKey" : "none");
  else if (code === "insufficient_quota") text = t("usedUp", { time: inWords(after) });
  else if (status === 429) text = t(after ? "busyFor" : "busy", { time: inWords(after) });
  else if ([401, 403, 404, 413, 503, 504].includes(status)) text = t(`status${status}`);
  else if (status >= 400 && status < 500) text = t("refused");
  return { text, detail: status > 0 ? message : "" };
}

/** Send a request; return its response. Throws a Failure, or an AbortError. */
export async function call(path, { body, method = body === undefined ? "GET" : "POST", signal } = {}) {
  const headers = {};
  const key = new TextEncoder().encode(choice("key")); // a header is bytes: as text it could be Latin-1 alone
  if (key.length) headers.Authorization = `Bearer ${String.fromCharCode(...key)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0);
  }
  if (response.ok) return response;
  const after = Number(response.headers.get("Retry-After")) || null;
  const text = await response.text().catch(() => "");
  let error = { message: text.slice(0, 500) };
  try { error = JSON.parse(text).error ?? error; } catch { /* a proxy's page, not the gateway's */ }
  if (response.status === 401) error.code = key.length ? "unknown_key" : "no_key"; // the gateway has one code for both
  throw new Failure(response.status, { ...error, after });
}

/** Yield the chunks of a streamed answer. Throws a Failure, or an AbortError. */
export async function* stream(body, signal) {
  const response = await call("v1/chat/completions", { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Failure(chunk.error.status ?? 500, chunk.error);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure(-1);
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Failure(-1); // an end without [DONE] is none
}
