// What the cluster is like now, for every open tab of this console with one event stream between them.
//
// Browsers allow six connections to a host, so a stream per tab would stop the seventh tab dead. One visible tab leads: it holds
// a Web Lock, follows the events, reads the state after each, and tells the others over a BroadcastChannel. A tab that is hidden
// gives the lock up. Where there is no lock (plain HTTP to a name), and where the leading tab falls silent, a tab asks by itself.
import { ApiError, address, base, parse, read, readAll, signOut } from "./api.js";

const POLL_MS = 5_000; // reads also without an event: ages, counts, and nodes that fall silent
const COLLECT_MS = 200; // events come in bursts
const REST_FACTOR = 15; // a large fleet's state is costly to make: rest that many times as long as the answer let wait
export const STALE_MS = 15_000; // three polls
const REST_MAX_MS = STALE_MS / 2; // the other half is for the next answer, also over a slow link
const SILENT_MS = 5_000; // a reading that nobody has begun to answer by then is told; with the rest before it, below STALE_MS
const RECONNECT_MS = 3_000;
const EVENTS_KEPT = 500;

export const state = {
  snapshot: null, // { status, models, nodes, replicas, at }: `at` on this browser's clock
  events: [], // the newest last
  connection: "connecting", // live | polling | connecting | interrupted: the last reading failed
  role: "alone", // leader | follower | alone
  problem: "", // why the last reading failed
};
const watchers = new Set();
const name = `llmgw ${base.pathname}`; // two clusters below one host must not hear each other
let channel = null;
let release = null; // ends our turn as the leading tab
let waiting = null; // aborts waiting for the turn
let stream = null;
let timer = 0;
let dueAt = 0;
let reading = false;
let again = false;
let restUntil = 0;
let started = false;

export function onChange(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}
const changed = () => { for (const watcher of watchers) watcher(); };
export const isStale = () => state.snapshot === null ? false : Date.now() - state.snapshot.at > STALE_MS;
export const replicaOf = (id) => state.snapshot?.replicas.find((one) => one.id === id);

export function start() {
  if (started) return;
  started = true;
  if ("BroadcastChannel" in globalThis) {
    channel = new BroadcastChannel(name);
    channel.onmessage = ({ data }) => hear(data);
    channel.postMessage({ type: "hello" });
  }
  document.addEventListener("visibilitychange", turn);
  turn();
}

export function stop() {
  if (!started) return;
  started = false;
  document.removeEventListener("visibilitychange", turn);
  follow();
  channel?.close();
  channel = null;
  restUntil = 0;
  Object.assign(state, { snapshot: null, events: [], connection: "connecting", role: "alone", problem: "" });
}

/** Tells the other tabs that the session is to end. This one does not hear it. */
export const tellLeaving = () => channel?.postMessage({ type: "leaving" });

/** Something was ordered here: look soon, whoever leads. */
export function look() {
  if (state.role === "follower") channel?.postMessage({ type: "look" });
  else lookNow();
}

function lookNow() {
  restUntil = 0; // an order was given, or the stream was cut: this reading is not one of many
  schedule(COLLECT_MS);
}

// --- who leads

function turn() {
  if (document.hidden) follow();
  else lead();
}

function lead() {
  if (!started || waiting || release) return;
  if (!navigator.locks) {
    state.role = "alone";
    state.connection = "polling";
    schedule(0);
    return;
  }
  if (state.role !== "leader") state.role = "follower";
  const mine = (waiting = new AbortController());
  navigator.locks.request(name, { signal: mine.signal }, () => {
    if (waiting === mine) waiting = null;
    if (!started || document.hidden) return undefined;
    return new Promise((done) => {
      release = done;
      state.role = "leader";
      state.connection = "connecting";
      changed();
      schedule(0);
      followEvents();
    });
  }).catch((err) => { if (err.name !== "AbortError") state.problem = err.message; });
  schedule(channel && state.snapshot ? POLL_MS : COLLECT_MS); // in case nobody tells us anything
  changed();
}

function follow() {
  waiting?.abort();
  waiting = null;
  release?.();
  release = null;
  stream?.close();
  stream = null;
  clearTimeout(timer);
  dueAt = 0;
  if (state.role === "leader") state.role = "follower";
}

function hear(message) {
  if (!started) return;
  if (message.type === "leaving") signOut("You have signed out in another tab.");
  else if (message.type === "hello" && release && state.snapshot) share();
  else if (message.type === "look" && release) lookNow();
  else if (message.type === "event" && !release) {
    merge([message.event]);
    changed();
  } else if (message.type === "state" && !release) {
    state.snapshot = message.snapshot;
    state.events = message.events;
    state.connection = message.connection;
    state.problem = message.problem;
    changed();
  }
}

const share = () => channel?.postMessage({ type: "state", snapshot: state.snapshot, events: state.events, connection: state.connection, problem: state.problem });

// --- reading

function schedule(inMs) {
  const now = Date.now();
  const at = Math.max(now + inMs, restUntil);
  if (dueAt && dueAt <= at) return;
  clearTimeout(timer);
  dueAt = at;
  timer = setTimeout(() => { dueAt = 0; refresh(); }, at - now);
}

async function refresh() {
  if (!started || document.hidden) return;
  if (reading) { again = true; return; }
  const fresh = state.snapshot && Date.now() - state.snapshot.at < 2 * POLL_MS;
  if (state.role === "follower" && fresh) { schedule(POLL_MS); return; }
  reading = true;
  const began = Date.now();
  let madeIn = 0; // until the last answer began, which is the control plane's work; the rest of it is the link's
  const heard = () => { madeIn = Date.now() - began; };
  const silent = setTimeout(() => { if (!madeIn) becomes("interrupted"); }, SILENT_MS);
  try {
    const [status, models, nodes, replicas] = await Promise.all([read("status", undefined, heard), ...["models", "nodes", "replicas"].map((noun) => readAll(noun, heard))]);
    if (!started) return;
    state.snapshot = { status, models, nodes, replicas, at: Date.now() };
    state.problem = "";
    if (!state.events.length) await readEvents();
    if (!started) return;
    state.connection = followed();
  } catch (err) {
    if (!started) return; // the session is over
    state.problem = err instanceof ApiError ? err.message : "the control plane does not answer";
    state.connection = "interrupted";
  } finally {
    clearTimeout(silent);
    reading = false;
  }
  if (!started) return;
  if (release) share();
  changed();
  // Over a slow link the rest is shorter: the next answer may take half as long again and is still in time. Nobody hurries a
  // control plane that is slow itself or gives no answer.
  const hurry = state.connection !== "interrupted" && madeIn < SILENT_MS;
  const spare = hurry ? Math.max(0, STALE_MS - 1.5 * (Date.now() - began)) : STALE_MS;
  restUntil = Date.now() + Math.min(madeIn * REST_FACTOR, REST_MAX_MS, spare);
  schedule(again ? COLLECT_MS : Math.min(POLL_MS, spare));
  again = false;
}

/** How this tab hears of changes while the control plane answers. The stream may have outlived readings that failed. */
const followed = () => stream?.readyState === EventSource.OPEN ? "live" : "polling";

function becomes(connection) {
  if (!started || state.connection === connection) return;
  state.connection = connection;
  if (release) share();
  changed();
}

/** What can be read decides, so after a reading that failed only one that succeeds says anything better. */
function heardOfStream(connection) {
  if (state.connection !== "interrupted") becomes(connection);
}

async function readEvents() {
  const page = await read("events?limit=200");
  merge(page.events);
}

function merge(events) {
  const seen = new Map(state.events.map((event) => [event.seq, event]));
  for (const event of events) seen.set(event.seq, event);
  state.events = [...seen.values()].sort((a, b) => a.seq - b.seq).slice(-EVENTS_KEPT);
}

function followEvents() {
  if (!release || stream) return;
  const last = state.events.at(-1)?.seq;
  const from = address("api/v1/events");
  if (last !== undefined) from.searchParams.set("after", String(last));
  const mine = (stream = new EventSource(from));
  mine.onopen = () => { heardOfStream("live"); schedule(COLLECT_MS); };
  mine.onmessage = ({ data }) => {
    let event;
    try { event = parse(data); } catch { return; }
    merge([event]);
    channel?.postMessage({ type: "event", event });
    changed();
    schedule(COLLECT_MS);
  };
  mine.onerror = () => { // also the server's own "error" event; after each it is safest to begin anew from the last event
    mine.close();
    if (stream !== mine) return;
    stream = null;
    heardOfStream("polling");
    lookNow(); // is anybody there?
    setTimeout(followEvents, RECONNECT_MS);
  };
}
