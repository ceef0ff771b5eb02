// A settings document as plain data: its keys by dotted path, edits laid over it, and TOML for people. Pure; the server decides what is valid.

const BARE = /^[A-Za-z0-9_-]+$/;
// What a reader would not see, or would see turned around: in TOML it can be written as its number.
const UNSEEN = /[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const SHORT = { "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r" };

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const isTables = (value) => Array.isArray(value) && value.length > 0 && value.every(isTable);
export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
export const copy = (value) => value === undefined ? undefined : JSON.parse(JSON.stringify(value));

// --- paths, as TOML writes them: engines."llama.cpp".load_limit_s

export const joined = (path, key) => {
  const part = BARE.test(key) ? key : text(key);
  return path ? `${path}.${part}` : part;
};

export function partsOf(path) {
  const found = [];
  for (const [, quoted, bare] of path.matchAll(/("(?:[^"\\]|\\.)*")|([^."]+)/g)) found.push(bare ?? unquoted(quoted));
  return found;
}

function unquoted(quoted) {
  try { return JSON.parse(quoted); } catch { return quoted.slice(1, -1); }
}

export function valueAt(values, path) {
  let value = values;
  for (const part of partsOf(path)) {
    if (!isTable(value) || !Object.hasOwn(value, part)) return undefined;
    value = value[part];
  }
  return value;
}

// --- documents and edits: a Map of path to { value } or { unset: true }

/** Every key that is set, by its path. `isKey(path)` tells keys whose values are tables from tables of keys. */
export function leaves(values, isKey, above = "") {
  const found = new Map();
  for (const [name, value] of Object.entries(values)) {
    const path = joined(above, name);
    if (isTable(value) && !isKey(path)) for (const [inner, one] of leaves(value, isKey, path)) found.set(inner, one);
    else found.set(path, value);
  }
  return found;
}

/** The document with the edits in it. */
export function edited(values, edits) {
  const found = copy(values);
  for (const [path, edit] of edits) {
    const parts = partsOf(path);
    if (edit.unset) remove(found, parts);
    else put(found, parts, copy(edit.value));
  }
  return found;
}

function put(table, parts, value) {
  for (const part of parts.slice(0, -1)) {
    if (!Object.hasOwn(table, part) || !isTable(table[part])) table[part] = {};
    table = table[part];
  }
  table[parts.at(-1)] = value;
}

function remove(table, [part, ...rest]) {
  if (!rest.length) delete table[part];
  else if (isTable(table[part])) {
    remove(table[part], rest);
    if (!Object.keys(table[part]).length) delete table[part];
  }
}

/** What makes `after` of `before`, both by path. */
export function editsBetween(before, after) {
  const found = new Map();
  for (const [path, value] of after) if (!same(before.get(path), value)) found.set(path, { value: copy(value) });
  for (const path of before.keys()) if (!after.has(path)) found.set(path, { unset: true });
  return found;
}

// --- TOML

function text(value) {
  const safe = value.replace(/["\\]/g, "\\$&").replace(UNSEEN, (one) => SHORT[one] ?? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0").toUpperCase()}`);
  return `"${safe}"`;
}

/** A value on one line. */
export function inline(value) {
  if (typeof value === "string") return text(value);
  if (Array.isArray(value)) return `[${value.map(inline).join(", ")}]`;
  if (isTable(value)) return Object.keys(value).length ? `{ ${Object.entries(value).map(([name, one]) => `${joined("", name)} = ${inline(one)}`).join(", ")} }` : "{}";
  return String(value ?? "");
}

/** A document as the server writes it: keys before tables, in the order of `order(path)`. */
export function toml(values, order) {
  const blocks = [];
  write(values, "", order, blocks);
  return blocks.length ? `${blocks.join("\n\n")}\n` : "";
}

function write(table, path, order, blocks, header = "") {
  const names = Object.keys(table).sort((a, b) => order(joined(path, a)) - order(joined(path, b)));
  const isBelow = (value) => isTables(value) || isTable(value);
  const lines = names.filter((name) => !isBelow(table[name])).map((name) => `${joined("", name)} = ${listed(table[name])}`);
  if (lines.length || (header && !names.length) || header.startsWith("[[")) blocks.push([...(header ? [header] : []), ...lines].join("\n"));
  for (const name of names.filter((one) => isBelow(table[one]))) {
    const inner = joined(path, name);
    if (isTable(table[name])) write(table[name], inner, order, blocks, `[${inner}]`);
    else for (const one of table[name]) write(one, inner, order, blocks, `[[${inner}]]`);
  }
}

const listed = (value) => Array.isArray(value) && value.length ? `[\n${value.map((one) => `    ${inline(one)},\n`).join("")}]` : inline(value);

/** The line (from 1) on which `path` of a fault stands in a text, or its table's; 0: nowhere. */
export function lineOf(source, path) {
  let header = "";
  let best = 0;
  let length = -1;
  const counts = new Map();
  const covers = (found) => path === found || path.startsWith(`${found}.`) || path.startsWith(`${found}[`);
  source.split("\n").forEach((line, index) => {
    const table = /^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$/.exec(line);
    const key = /^\s*("(?:[^"\\]|\\.)*"|[A-Za-z0-9_."-]+?)\s*=/.exec(line);
    let found = null;
    if (table) {
      header = table[2];
      if (table[1] === "[[") {
        const count = counts.get(header) ?? 0;
        counts.set(header, count + 1);
        header = `${header}[${count}]`;
      }
      found = header;
    } else if (key) found = header ? `${header}.${key[1]}` : key[1];
    if (found !== null && found.length > length && covers(found)) [best, length] = [index + 1, found.length];
  });
  return best;
}
