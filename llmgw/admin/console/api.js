// Calls of the control plane that served this page, from wherever a proxy shows it: every address is made from this page's own.

export const base = new URL("../", document.baseURI); // above /console/
const BACKGROUND_LIMIT_MS = 20_000; // for reads that nobody waits in front of
let session = null;
const watchers = new Set();

export class ApiError extends Error {
  constructor(status, body) {
    const error = body && typeof body.error === "object" && body.error ? body.error : {};
    super(String(error.message ?? `the server answered with status ${status}`));
    this.status = status;
    this.code = String(error.code ?? "");
  }
}

export const currentSession = () => session;

/** `watcher(session, why)` is called whenever somebody signs in or out, or the session is found to be over. */
export function onSession(watcher) {
  watchers.add(watcher);
}

function setSession(found, why = "") {
  session = found;
  for (const watcher of watchers) watcher(found, why);
}

export const address = (path) => new URL(path, base);

async function answerOf(response) {
  const text = await response.text();
  let body = null;
  try { body = text ? JSON.parse(text) : null; } catch { /* a proxy's page, not ours */ }
  if (!response.ok) throw new ApiError(response.status, body);
  if (body === null) throw new ApiError(response.status, { error: { message: "the answer was not from llmgw; is a proxy in between?" } });
  return body;
}

function lost(err) {
  if (err instanceof ApiError && err.status === 401 && session) setSession(null, "Your session has ended. Please sign in again.");
  return err;
}

/** Reads below /api/v1. Raises ApiError, or what fetch raises when nobody answers. */
export async function read(path, signal) {
  const limit = AbortSignal.timeout(BACKGROUND_LIMIT_MS);
  try {
    const joined = signal && AbortSignal.any ? AbortSignal.any([signal, limit]) : signal ?? limit;
    return await answerOf(await fetch(address(`api/v1/${path}`), { headers: { accept: "application/json" }, cache: "no-store", signal: joined }));
  } catch (err) {
    throw lost(err);
  }
}

/** Every row of a list, its pages put together. */
export async function readAll(noun) {
  const rows = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await read(cursor ? `${noun}?cursor=${encodeURIComponent(cursor)}` : noun);
    rows.push(...page[noun]);
    cursor = page.next ?? null;
  }
  return rows;
}

/** An order below /api/v1, carried out once however often the network repeats it. */
export async function order(method, path, body, more = {}) {
  const headers = { "x-csrf-token": session?.csrf ?? "", "idempotency-key": key(), ...more };
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await answerOf(await fetch(address(`api/v1/${path}`), { method, headers, body: body === undefined ? undefined : JSON.stringify(body) }));
  } catch (err) {
    throw lost(err);
  }
}

const key = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

/** A request to /v1 of the router, through the control plane; the whole response, so that it can be read as it comes. */
export function ask(path, body, apiKey, signal) {
  const headers = { "content-type": "application/json", "x-csrf-token": session?.csrf ?? "" };
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  return fetch(address(`console/v1/${path}`), { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Takes up a session that this browser still holds. False without one; raises when nobody answers. */
export async function resume() {
  try {
    setSession(await answerOf(await fetch(address("session"), { cache: "no-store" })));
    return true;
  } catch (err) {
    if (err instanceof ApiError && err.status === 401) return false;
    throw err;
  }
}

/** Signs in with {token} or {link}. */
export async function signIn(how) {
  await answerOf(await fetch(address("session"), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(how) }));
  if (!(await resume())) {
    throw new Error("This browser did not keep the session's cookie. Over plain HTTP it does so only for 127.0.0.1 and localhost: use TLS, or a tunnel such as ssh -L 8081:127.0.0.1:8081.");
  }
}

export async function signOut(why = "You have signed out.") {
  try {
    await fetch(address("session"), { method: "DELETE", headers: { "x-csrf-token": session?.csrf ?? "" } });
  } finally {
    setSession(null, why);
  }
}

export const mayOrder = () => session?.role === "operator" || session?.role === "admin";
export const forget = (why) => session && setSession(null, why);
