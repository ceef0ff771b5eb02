// The cluster settings as this page knows them, and what the person in front of it has changed and not saved yet. The edits live
// here, apart from any view: a look at another screen, at the text or at the history loses nothing. They end with a sign-out.
//
// Either the form holds the edits (`edits`) or the text does (`text`); the server alone reads TOML and says what is valid.
import { ApiError, freshKey, mayOrder, onSession, order, read, readExactly } from "./api.js";
import { look, state } from "./live.js";
import { edited, editsBetween, leaves, partsOf, same, toml, valueAt } from "./settings_document.js";

const ENGINES = "engines.<name>"; // how the schema calls the tables of engines
const ROUNDS = 3; // that one review takes up newer versions before it says that somebody saves all the time
const fresh = () => ({
  schema: null, // { sections, keys: Map of path to key }
  newest: null, // the newest version, the control planes and the roll-out
  inForce: new Map(), // by path, of the control plane that serves this page: { value, origin, in_vain }
  problem: "", // why the last reading failed
  base: null, // the version that the edits began from
  lead: "form", // which of the two holds the edits: form | toml
  edits: new Map(), // of path to { value } or { unset: true }
  text: "",
  engines: new Set(), // that were added to the form and have no key yet
  faults: [], // of the last check: { path, reason }
  checks: 0, // how many there were: their faults are looked at once, and no more when one of them goes
  told: "", // what came of the last order
  failed: "",
  busy: "", // what goes on
  review: null, // what saving would do: { changes, restart, warnings }
  meanwhile: null, // { from, to, author, reason, changes, both }: what others saved since the edits began
  reason: "",
  asked: "", // what `key` stands for: the same save, asked for again, is carried out once
  key: "",
});
export const desk = fresh();
const watchers = new Set();
let turn = 0; // rises when everything is forgotten; what was asked for before that is thrown away
let reading = false;
let owner = "";

onSession((session, _, wait) => {
  if (wait || (session && session.name !== owner)) forget(); // a session that ran out keeps the edits for whoever signs in again
  if (session) owner = session.name;
});

function forget() {
  turn += 1;
  Object.assign(desk, fresh());
}

export function watch(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}
const changed = () => { for (const watcher of watchers) watcher(); };
const words = (err) => err instanceof ApiError ? err.message : "the control plane does not answer";

addEventListener("beforeunload", (event) => { if (isDirty()) event.preventDefault(); });

// --- what there is

export async function refresh() {
  if (reading) return;
  reading = true;
  const mine = turn;
  try {
    const [newest, inForce, schema] = await Promise.all([readExactly("settings"), readExactly("settings/effective"), desk.schema ?? read("settings/schema").then(arranged)]);
    if (mine !== turn) return;
    Object.assign(desk, { schema, inForce: new Map(inForce.keys.map((one) => [one.path, one])), problem: "" });
    take(newest);
  } catch (err) {
    if (mine === turn) desk.problem = words(err);
  } finally {
    reading = false;
  }
  changed();
}

function take(newest) {
  if (desk.newest && newest.version < desk.newest.version) return; // a standby that is a moment behind
  desk.newest = newest;
  if (!desk.base || !isDirty()) begin(newest);
}

/** Edits begin from this version; there are none yet. */
function begin(version) {
  Object.assign(desk, { base: version, edits: new Map(), text: version.toml });
}

function arranged({ sections }) {
  const keys = new Map();
  const found = sections.map((section) => {
    const one = { ...section, isEngines: section.name === ENGINES, isRules: section.array, keys: section.keys.map((key) => ({ ...key, name: key.path.split(".").at(-1), cluster: section.scope === "cluster" })) };
    for (const key of one.keys) keys.set(key.path, key);
    return one;
  });
  return { sections: found, keys };
}

/** What is declared of a key; of an engine's keys by the one engine that the schema shows. */
export function declared(path) {
  return desk.schema.keys.get(path) ?? (path.startsWith("engines.") ? engineKey(path.split(".").at(-1)) : undefined);
}

const engineSection = () => desk.schema.sections.find((section) => section.isEngines);
const engineKey = (name) => engineSection()?.keys.find((key) => key.name === name);
const isKey = (path) => declared(path) !== undefined;
/** Where a path stands in the schema's order. */
const rank = (asked) => {
  const parts = partsOf(asked);
  const path = parts[0] === "engines" && parts.length > 1 ? ["engines", "<name>", ...parts.slice(2)].join(".") : asked;
  const paths = [...desk.schema.keys.keys()];
  const at = paths.findIndex((one) => one === path || one.startsWith(`${path}.`) || one.startsWith(`${path}[`));
  return at < 0 ? paths.length : at;
};

/** Without a store the settings stand in a file and have no versions. */
export const inFile = () => desk.newest?.version === 0 && state.snapshot?.status.store.mode === "none";
/** That file, as the server tells it. */
export const fileName = () => inFile() && desk.newest?.reason.startsWith("from ") ? desk.newest.reason.slice(5) : "";

/** Why nobody may change anything here; "" where one may. */
export function whyReadOnly() {
  if (inFile()) return `Without [store] the settings stand in ${fileName() || "this machine's file"}: edit that file. A change is taken live.`;
  if (!mayOrder()) return "You have signed in as a viewer: you may read everything here and change nothing.";
  return "";
}

// --- one key

export const defaultOf = (path) => {
  const key = declared(path);
  return key?.default ?? (path === "guard.rule" ? [] : null);
};

/** What the form shows at a key: { value, set, edited }. */
export function shown(path) {
  if (inFile()) {
    const here = desk.inForce.get(path);
    return { value: here ? here.value : defaultOf(path), set: here?.origin === "file", edited: false };
  }
  const edit = desk.edits.get(path);
  const value = edit ? edit.value : valueAt(desk.base.document, path);
  return { value: value === undefined ? defaultOf(path) : value, set: value !== undefined, edited: edit !== undefined };
}

export function setKey(path, value) {
  const was = valueAt(desk.base.document, path);
  if (same(value, was === undefined ? defaultOf(path) : was)) desk.edits.delete(path);
  else desk.edits.set(path, { value });
  touched(path);
}

/** Back to the default. */
export function unsetKey(path) {
  if (valueAt(desk.base.document, path) === undefined) desk.edits.delete(path);
  else desk.edits.set(path, { unset: true });
  touched(path);
}

export function undoKey(path) {
  desk.edits.delete(path);
  touched(path);
}

function touched(path) {
  desk.lead = "form";
  desk.faults = desk.faults.filter((fault) => fault.path !== path && !fault.path.startsWith(`${path}[`) && !fault.path.startsWith(`${path}.`));
  desk.told = desk.failed = "";
  changed();
}

export const faultsAt = (path) => desk.faults.filter((fault) => fault.path === path).map((fault) => fault.reason);

/** The engines that the form shows, and those that nodes have beside them. */
export function engines() {
  const there = new Set(desk.engines);
  for (const name of Object.keys(edited(desk.base.document, desk.edits).engines ?? {})) there.add(name);
  for (const name of Object.keys(desk.base.document.engines ?? {})) there.add(name);
  if (inFile()) for (const path of desk.inForce.keys()) if (path.startsWith("engines.")) there.add(partsOf(path)[1]);
  const known = new Set((state.snapshot?.nodes ?? []).flatMap((node) => node.engines.map((engine) => engine.name)));
  return { there: [...there].sort(), more: [...known].filter((name) => !there.has(name)).sort() };
}

export function addEngine(name) {
  desk.engines.add(name);
  changed();
}

// --- the draft as a whole

export const isDirty = () => desk.base !== null && (desk.lead === "form" ? desk.edits.size > 0 : desk.text !== desk.base.toml);
const draft = () => edited(desk.base.document, desk.edits);

/** The text to show: as it was written, or what the form's edits make of it. */
export const textShown = () => desk.lead === "toml" ? desk.text : desk.edits.size ? toml(draft(), rank) : desk.base.toml;

export function setText(text) {
  desk.text = text;
  desk.lead = "toml";
  desk.faults = [];
  desk.told = desk.failed = "";
  if (!isDirty()) Object.assign(desk, { lead: "form", edits: new Map() });
  changed();
}

export function discard() {
  Object.assign(desk, { lead: "form", edits: new Map(), engines: new Set(), faults: [], told: "", failed: "", review: null, meanwhile: null, reason: "", asked: "", key: "" });
  begin(desk.newest);
  changed();
}

/** Runs one order at a time; what was forgotten meanwhile is not written into. */
async function alone(what, work) {
  if (desk.busy) return;
  const mine = turn;
  Object.assign(desk, { busy: what, told: "", failed: "" });
  changed();
  try {
    await work();
  } catch (err) {
    if (mine === turn) refused(err);
  }
  if (mine === turn) desk.busy = "";
  changed();
}

function refused(err) {
  desk.review = null;
  desk.faults = err instanceof ApiError ? err.faults : [];
  desk.checks += 1;
  desk.failed = desk.faults.length ? "" : words(err);
}

const check = (body) => order("POST", "settings/check", body, {}, JSON.parse);
const body = () => desk.lead === "toml" ? { toml: desk.text } : { document: draft() };

/** What the text says, as edits of `version`. Raises ApiError with the faults of a text that says nothing valid. */
async function editsOfText() {
  for (let round = 0; round < ROUNDS; round += 1) {
    const answer = await check({ toml: desk.text });
    const newest = desk.newest.version === answer.version ? desk.newest : await readExactly("settings");
    if (newest.version !== answer.version) continue;
    desk.newest = newest;
    const after = leaves(newest.document, isKey);
    for (const change of answer.changes) {
      if (change.after === null) after.delete(change.path);
      else after.set(change.path, change.after);
    }
    return editsBetween(leaves(desk.base.document, isKey), after);
  }
  throw busyOthers();
}

const busyOthers = () => new ApiError(412, { error: { message: "others save again and again; nothing was saved of yours, and your changes are kept" } });

/** So that the form can show what the text says. Where the text says nothing valid, it stays the text's. */
export const toForm = () => alone("Reading the text …", async () => {
  const edits = await editsOfText();
  Object.assign(desk, { edits, lead: "form", faults: [] });
});

/** Asks what saving would do, on the newest version: others' changes are taken up first. */
export const review = () => alone("Checking …", lookOver);

async function lookOver() {
  desk.faults = [];
  for (let round = 0; round < ROUNDS; round += 1) {
    const newest = await readExactly("settings");
    if (newest.version !== desk.base.version) await takeUp(newest);
    else desk.newest = newest;
    const answer = await check(body());
    if (answer.version !== desk.base.version) continue;
    desk.review = answer;
    return;
  }
  throw busyOthers();
}

/** Somebody was faster: the edits now stand on the newest version, and what changed meanwhile is kept to be shown. */
async function takeUp(newest) {
  if (desk.lead === "toml") desk.edits = await editsOfText();
  const wasFrom = desk.meanwhile?.from ?? desk.base.version;
  const { changes } = await readExactly(`settings/diff?from=${wasFrom}&to=${newest.version}`);
  const theirs = new Set(changes.map((change) => change.path));
  const says = (edit, path) => edit.unset ? valueAt(newest.document, path) === undefined : same(edit.value, valueAt(newest.document, path));
  for (const [path, edit] of desk.edits) if (says(edit, path)) desk.edits.delete(path);
  desk.meanwhile = { from: wasFrom, to: newest.version, author: newest.author, reason: newest.reason, changes, both: [...desk.edits.keys()].filter((path) => theirs.has(path)) };
  desk.newest = desk.base = newest;
  desk.text = desk.edits.size ? toml(draft(), rank) : newest.toml;
}

export function backToEditing() {
  desk.review = null;
  changed();
}

export function setReason(reason) {
  desk.reason = reason;
  changed();
}

export const save = () => alone("Saving …", async () => {
  const [method, what] = desk.lead === "toml" ? ["PUT", { toml: desk.text }] : ["PATCH", changesAsked()];
  const sent = { ...what, reason: desk.reason.trim() };
  const asked = JSON.stringify([method, sent, desk.base.version]);
  if (asked !== desk.asked) Object.assign(desk, { asked, key: freshKey() });
  try {
    const answer = await order(method, "settings", sent, { "if-match": `"${desk.base.version}"`, "idempotency-key": desk.key });
    desk.newest = await readExactly("settings").catch(() => desk.newest);
    discard();
    desk.told = saved(answer);
    look();
  } catch (err) {
    if (!(err instanceof ApiError)) { // it may have been carried out: the same key finds out
      desk.failed = "The control plane did not answer, so it is not known whether this was saved. Save again: it is saved once.";
      return;
    }
    if (err.status >= 500) { desk.failed = `${err.message}. Your changes are kept.`; return; }
    if (err.status !== 412) throw err;
    desk.review = null;
    await lookOver();
    if (desk.meanwhile) desk.failed = `${by(desk.meanwhile.author)} was faster. Nothing of yours was saved yet; look at it again.`;
    else throw err;
  }
});

const by = (author) => author || "Somebody";

function changesAsked() {
  const set = {};
  const unset = [];
  for (const [path, edit] of desk.edits) {
    if (edit.unset) unset.push(path);
    else set[path] = edit.value;
  }
  return { set, unset };
}

const saved = (answer) => `Saved as version ${answer.version}${answer.durability === "local" ? ", on this machine's disk" : ""}.${answer.restart?.length ? " Control planes restart for it, one after another." : " It takes effect within a second."}`;
