// Calls of the control plane that served this page, from wherever a proxy shows it: every address is made from this page's own.

export const base = new URL("../", document.baseURI); // above /console/
const BACKGROUND_LIMIT_MS = 20_000; // for reads that nobody waits in front of
const LEAVE_LIMIT_MS = 5_000; // for the end of a session, which is tried again
const AGAIN_MS = 3_000; // between looks for a control plane that does not answer
const LEAVING = `llmgw-leaving ${base.pathname}`; // two clusters below one host keep their sessions apart
let session = null;
const watchers = new Set();

export class ApiError extends Error {
  constructor(status, body) {
    const error = body && typeof body.error === "object" && body.error ? body.error : {};
    super(String(error.message ?? `the server answered with status ${status}`));
    this.status = status;
    this.code = String(error.code ?? "");
    this.faults = Array.isArray(error.faults) ? error.faults : []; // of a body that was not valid: { path, reason } each
  }
}

export const currentSession = () => session;

/** `watcher(session, why, wait)` is called whenever somebody signs in or out, or the session is found to be over; `wait`: what goes on. */
export function onSession(watcher) {
  watchers.add(watcher);
}

function setSession(found, why = "", wait = "") {
  session = found;
  for (const watcher of watchers) watcher(found, why, wait);
}

// Colours and cursor moves of terminals, and other characters that steer one: programs write them, no page should show them.
const CODES = /\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]/g;
const ESCAPED = /\\(?:u00[01789]|[bf])/; // how JSON writes them: most answers hold none and are not searched
export const plain = (text) => text.replace(CODES, "");

/** JSON from the API, with every text fit to be shown. */
export const parse = (text) => ESCAPED.test(text) ? JSON.parse(text, (_, value) => typeof value === "string" ? plain(value) : value) : JSON.parse(text);

export const address = (path) => new URL(path, base);

async function answerOf(response, parsed = parse) {
  const text = await response.text();
  let body = null;
  try { body = text ? parsed(text) : null; } catch { /* a proxy's page, not ours */ }
  if (!response.ok) throw new ApiError(response.status, body);
  if (body === null) throw new ApiError(response.status, { error: { message: "the answer was not from llmgw; is a proxy in between?" } });
  return body;
}

/** Of an error of a call made in the session `mine`: where that is over and still shown, the page says so. */
function lost(err, mine) {
  if (err instanceof ApiError && err.status === 401 && session && session === mine) setSession(null, "Your session has ended. Please sign in again.");
  return err;
}

/** Reads below /api/v1; `heard` is called when the answer begins. Raises ApiError, or what fetch raises when nobody answers. */
export const read = (path, signal, heard) => readAs(parse, path, signal, heard);

/** The same, with every text as it is kept: for what is written back. Whoever shows it makes it fit to be shown. */
export const readExactly = (path) => readAs(JSON.parse, path);

async function readAs(parsed, path, signal, heard) {
  const limit = AbortSignal.timeout(BACKGROUND_LIMIT_MS);
  const mine = session;
  try {
    const joined = signal && AbortSignal.any ? AbortSignal.any([signal, limit]) : signal ?? limit;
    const response = await fetch(address(`api/v1/${path}`), { headers: { accept: "application/json" }, cache: "no-store", signal: joined });
    heard?.();
    return await answerOf(response, parsed);
  } catch (err) {
    throw lost(err, mine);
  }
}

/** Every row of a list, its pages put together. */
export async function readAll(noun, heard) {
  const rows = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await read(cursor ? `${noun}?cursor=${encodeURIComponent(cursor)}` : noun, undefined, heard);
    rows.push(...page[noun]);
    cursor = page.next ?? null;
  }
  return rows;
}

/** An order below /api/v1, carried out once however often the network repeats it, or a person with the same key in `more`. */
export async function order(method, path, body, more = {}, parsed = parse) {
  const headers = { "x-csrf-token": session?.csrf ?? "", "idempotency-key": freshKey(), ...more };
  if (body !== undefined) headers["content-type"] = "application/json";
  const mine = session;
  try {
    return await answerOf(await fetch(address(`api/v1/${path}`), { method, headers, body: body === undefined ? undefined : JSON.stringify(body) }), parsed);
  } catch (err) {
    throw lost(err, mine);
  }
}

export const freshKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

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
  keep(""); // the session that was to end has no cookie any more
  if (!(await resume())) {
    throw new Error("This browser did not keep the session's cookie. Over plain HTTP it does so only for 127.0.0.1 and localhost: use TLS, or a tunnel such as ssh -L 8081:127.0.0.1:8081.");
  }
}

/** Ends the session, however long that takes: the page forgets it at once, but only the control plane can end it, for no script
 *  reaches its cookie. A page that is opened meanwhile goes on with it. */
export async function signOut(why = "You have signed out.") {
  if (!session) return;
  keep(session.csrf);
  await leave(session.csrf, why);
}

/** Goes on with a sign-out that found nobody. False where there was none. */
export async function finishSignOut() {
  const csrf = kept();
  if (csrf) await leave(csrf, "You have signed out.");
  return csrf !== "";
}

async function leave(csrf, why) {
  setSession(null, "", "Signing out …");
  while (kept() === csrf) {
    try {
      await answerOf(await fetch(address("session"), { method: "DELETE", headers: { "x-csrf-token": csrf }, signal: AbortSignal.timeout(LEAVE_LIMIT_MS) }));
      keep("");
    } catch (err) {
      if (err instanceof ApiError && err.code === "csrf") { keep(""); break; } // this browser holds another session by now
      const reason = err instanceof ApiError ? err.message : "the control plane does not answer";
      setSession(null, "", `The session could not be ended yet: ${reason}. Trying again …`);
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
  setSession(null, why);
}

let unkept = ""; // where storage is full or switched off: then only this page knows
function keep(csrf) {
  unkept = "";
  try {
    if (csrf) localStorage.setItem(LEAVING, csrf);
    else localStorage.removeItem(LEAVING);
  } catch { unkept = csrf; }
}

function kept() {
  try { return unkept || (localStorage.getItem(LEAVING) ?? ""); } catch { return ""; }
}

export const mayOrder = () => session?.role === "operator" || session?.role === "admin";
