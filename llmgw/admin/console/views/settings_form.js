// The settings as a form: a section for each table, a control for each key, and beside it where its value comes from.
import { Badge, Component, counted, html } from "../ui.js";
import { addEngine, defaultOf, desk, engines, faultsAt, fileName, isDirty, review, setKey, shown, undoKey, unsetKey, whyReadOnly } from "../settings.js";
import { inline, joined, same } from "../settings_document.js";
import { Control, plainFault } from "./settings_fields.js";

export const idOf = (path) => `key-${path}`;

export class Form extends Component {
  constructor() {
    super();
    this.state = { wanted: "", set: false };
  }
  /** A key that is to be seen must not be hidden by the search. */
  seek(path) {
    this.setState({ wanted: "", set: false }, () => focusKey(path));
  }
  componentDidMount() { if (this.props.handle) this.props.handle.current = this; }

  render(_, { wanted, set }) {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const isAsked = (path, key) => words.every((word) => `${path} ${key.help} ${key.unit ?? ""}`.toLowerCase().includes(word));
    const all = desk.schema.sections.flatMap((section) => rowsOf(section));
    const found = all.filter((row) => isAsked(row.path, row.key) && (!set || isSet(row.path)));
    const bySection = Map.groupBy ? Map.groupBy(found, (row) => row.section) : grouped(found);
    const why = whyReadOnly();
    const cluster = desk.schema.sections.filter((section) => section.scope === "cluster");
    const machine = desk.schema.sections.filter((section) => section.scope !== "cluster" && bySection.has(section));
    const searching = words.length > 0;
    return html`
      <div class="page-tools">
        <span class="orders"><label class="filter">Search <input type="search" value=${wanted} onInput=${(e) => this.setState({ wanted: e.target.value })} placeholder="key or words of its help" /></label>
          <label class="tick"><input type="checkbox" checked=${set} onChange=${(e) => this.setState({ set: e.target.checked })} /> Only what is set</label></span>
        <span class="count" role="status">${searching || set ? `${found.length} of ${counted(all.length, "key")}` : counted(all.length, "key")}</span>
      </div>
      <div class="settings" onKeyDown=${(e) => { if (e.key === "Enter" && e.target.matches(".key input, .rule input") && !why && isDirty()) review(); }}>
        ${cluster.map((section) => html`<${ClusterSection} key=${section.name} section=${section} rows=${bySection.get(section) ?? []} whole=${!searching && !set} why=${why} />`)}
        ${found.length ? null : html`<p class="empty">No key matches.</p>`}
      </div>
      ${machine.length ? html`<details class="panel" open=${searching || set ? true : null}><summary><h2>This machine's own keys</h2></summary>
        <p class="note">They are read from ${fileName() ? html`<code>${fileName()}</code>` : "the file"} of the control plane that serves this page, and changed there. Most take a restart, which the control planes do one after another.</p>
        ${machine.map((section) => html`<section key=${section.name} class="machine" aria-label=${section.name}><h3><code>[${section.name}]</code> ${section.help}</h3>
          <dl class="facts keys">${bySection.get(section).map(({ path, key }) => html`<${MachineKey} key=${path} path=${path} field=${key} />`)}</dl></section>`)}
      </details>` : null}`;
  }
}

function grouped(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.section, [...found.get(row.section) ?? [], row]);
  return found;
}

/** The keys of a section as they stand in documents: of engines one for each that is there, of rules the list. */
function rowsOf(section) {
  if (section.isRules) return [{ section, path: section.name, key: { help: `${section.help} ${section.keys.map((key) => `${key.name} ${key.help}`).join(" ")}` } }];
  if (!section.isEngines) return section.keys.map((key) => ({ section, path: key.path, key }));
  return engines().there.flatMap((name) => section.keys.map((key) => ({ section, path: joined(joined("engines", name), key.name), key })));
}

const isSet = (path) => {
  const here = shown(path);
  return here.set || here.edited || desk.inForce.get(path)?.origin === "file";
};

/** `whole` False: only what was searched for. */
function ClusterSection({ section, rows, whole, why }) {
  if (!rows.length && !(whole && section.isEngines)) return null;
  const title = section.isEngines ? "[engines.<name>]" : section.isRules ? `[[${section.name}]]` : `[${section.name}]`;
  return html`<section class="panel" aria-label=${section.name}>
    <header class="panel-head"><h2><code>${title}</code> <span class="help">${section.help}</span></h2></header>
    ${section.isRules ? html`<${Rules} section=${section} why=${why} />` : rows.map(({ path, key }) => html`<${Key} key=${path} path=${path} field=${key} why=${why} />`)}
    ${section.isEngines && whole ? html`<${AddEngine} why=${why} />` : null}
    ${section.isEngines && whole && !rows.length ? html`<p class="note">Every engine runs with its defaults: ${section.keys.map((key) => `${key.name} ${inline(key.default)}`).join(", ")}.</p>` : null}
  </section>`;
}

const limits = (key) => {
  const unit = key.unit ? ` ${key.unit}` : "";
  if (key.low !== null && key.low !== undefined && key.high !== null && key.high !== undefined) return `${key.low} to ${key.high}${unit}`;
  return key.low !== null && key.low !== undefined ? `at least ${key.low}${unit}` : "";
};

const ORIGINS = { default: "default", file: "from the file", document: "from the document" };

function Key({ path, field, why }) {
  const { value, set, edited } = shown(path);
  const here = desk.inForce.get(path);
  const id = idOf(path);
  const faults = faultsAt(path);
  const fault = faults.join("; ") || (edited && set ? plainFault(field, value) : "");
  const origin = edited ? (set ? "changed, not saved" : "default, not saved") : ORIGINS[desk.newest.version ? (set ? "document" : "default") : here?.origin ?? "default"];
  const usual = defaultOf(path);
  const range = limits(field);
  const waits = !edited && here && !same(here.value, value); // for a restart; or `llmgw dev` has a habit of its own
  const vain = here?.in_vain !== null && here?.in_vain !== undefined;
  return html`<div class=${`key ${edited ? "edited" : ""}`} data-path=${path}>
    <div class="key-name"><label for=${id}><code>${path}</code></label> ${field.applies === "restart" ? html`<${Badge} word="restart" />` : null}</div>
    <div class="key-control"><${Control} id=${id} field=${field} value=${value} disabled=${why !== ""} describedby=${`${id}-help ${id}-fault`} invalid=${fault !== ""} change=${(next) => setKey(path, next)} />${field.unit ? html`<span class="unit">${field.unit}</span>` : null}</div>
    <div class="key-side"><span class=${`origin ${edited ? "edited" : ""}`}>${origin}</span>
      ${edited && !why ? html`<button type="button" class="quiet" aria-label=${`Undo the change of ${path}`} onClick=${() => { undoKey(path); focusKey(path); }}>Undo</button>` : null}
      ${set && !why ? html`<button type="button" class="quiet" aria-label=${`${path}: back to its default`} onClick=${() => { unsetKey(path); focusKey(path); }}>Back to default</button>` : null}</div>
    <p class="key-help note" id=${`${id}-help`}>${field.help} ${range ? `${range[0].toUpperCase()}${range.slice(1)}.` : ""} Default: <code>${inline(usual)}</code>.${field.applies === "restart" ? " Control planes restart for it, one after another." : ""}
      ${waits ? html` In force here now: <code>${inline(here.value)}</code>.` : null}${vain ? html` <span class="vain">This machine's file says <code>${inline(here.in_vain)}</code>, in vain: the cluster's document holds this key.</span>` : null}</p>
    <p class="key-fault failed" id=${`${id}-fault`}>${fault}</p>
  </div>`;
}

function MachineKey({ path, field }) {
  const here = desk.inForce.get(path);
  const value = here ? here.value : field.default;
  return html`<div><dt title=${field.help}><code>${path}</code></dt><dd><code>${field.secret && value ? "set" : inline(value)}</code> <span class="origin">${here?.origin === "file" ? "from the file" : "default"}</span></dd></div>`;
}

export function focusKey(path) {
  for (let at = path; at; at = at.replace(/(\.[^.[\]]+|\[\d+\])$/, "") === at ? "" : at.replace(/(\.[^.[\]]+|\[\d+\])$/, "")) {
    const found = document.getElementById(idOf(at));
    if (found && !found.disabled) {
      found.closest("details")?.setAttribute("open", "");
      found.focus();
      found.scrollIntoView({ block: "center" });
      return;
    }
  }
  document.getElementById("main")?.focus({ preventScroll: true });
}

// --- engines

class AddEngine extends Component {
  constructor() {
    super();
    this.state = { name: "" };
  }
  render({ why }, { name }) {
    if (why) return null;
    const chosen = name.trim();
    const add = () => { if (chosen) { addEngine(chosen); this.setState({ name: "" }); setTimeout(() => focusKey(`${joined("engines", chosen)}.command`)); } };
    return html`<div class="controls"><label>Engine <input class="engine" type="text" list="engines-known" value=${name} onInput=${(e) => this.setState({ name: e.target.value })} onKeyDown=${(e) => { if (e.key === "Enter") { e.preventDefault(); add(); } }} /></label>
      <datalist id="engines-known">${engines().more.map((one) => html`<option key=${one} value=${one}></option>`)}</datalist>
      <button type="button" aria-disabled=${chosen ? null : "true"} onClick=${add}>Set keys for it</button></div>`;
  }
}

// --- rules

/** The list of rules, each with its fields. A rule says only what differs from its defaults. */
function Rules({ section, why }) {
  const path = section.name;
  const { value, set, edited } = shown(path);
  const rules = Array.isArray(value) ? value : [];
  const put = (next) => setKey(path, next);
  const replaced = (index, rule) => rules.map((one, at) => at === index ? rule : one);
  const moved = (index, to) => { const next = [...rules]; next.splice(to, 0, ...next.splice(index, 1)); return next; };
  const faults = faultsAt(path);
  return html`<div class=${`rules ${edited ? "edited" : ""}`} id=${idOf(path)} tabindex="-1" data-path=${path}>
    <p class="key-side"><span class=${`origin ${edited ? "edited" : ""}`}>${edited ? "changed, not saved" : set ? ORIGINS.document : ORIGINS[desk.newest.version ? "default" : desk.inForce.get(path)?.origin ?? "default"]}</span>
      ${edited && !why ? html`<button type="button" class="quiet" aria-label="Undo the changes of the rules" onClick=${() => { undoKey(path); focusKey(path); }}>Undo</button>` : null}</p>
    <p class="failed">${faults.join("; ")}</p>
    ${rules.length ? null : html`<p class="empty">No rule.</p>`}
    ${rules.map((rule, index) => html`<${Rule} key=${index} section=${section} rule=${rule} index=${index} last=${index === rules.length - 1} why=${why}
      change=${(next) => put(replaced(index, next))} move=${(to) => { put(moved(index, to)); setTimeout(() => focusKey(`${path}[${to}]`)); }}
      remove=${() => { put(rules.filter((_, at) => at !== index)); focusKey(path); }} />`)}
    ${why ? null : html`<button type="button" onClick=${() => { put([...rules, { name: "" }]); setTimeout(() => focusKey(`${path}[${rules.length}].name`)); }}>Add a rule</button>`}
  </div>`;
}

function Rule({ section, rule, index, last, why, change, move, remove }) {
  const path = `${section.name}[${index}]`;
  const title = rule.name || `rule ${index + 1}`;
  const own = faultsAt(path);
  const unknown = desk.faults.filter((fault) => fault.path.startsWith(`${path}.`) && !section.keys.some((key) => fault.path === `${path}.${key.name}` || fault.path.startsWith(`${path}.${key.name}[`)));
  return html`<fieldset class="rule" id=${idOf(path)} tabindex="-1" data-path=${path}>
    <legend>${title}</legend>
    <div class="fields rule-fields">${section.keys.map((key) => {
      const at = `${path}.${key.name}`;
      const id = idOf(at);
      const fault = [...faultsAt(at), ...desk.faults.filter((one) => one.path.startsWith(`${at}[`)).map((one) => one.reason)].join("; ");
      const value = Object.hasOwn(rule, key.name) ? rule[key.name] : key.default ?? (key.type.startsWith("list") ? [] : "");
      const put = (next) => {
        const { [key.name]: _, ...rest } = rule;
        const keep = key.name === "name" || !same(next, key.default);
        change(Object.fromEntries(section.keys.filter((one) => one.name === key.name ? keep : Object.hasOwn(rest, one.name)).map((one) => [one.name, one.name === key.name ? next : rest[one.name]])));
      };
      return html`<div key=${key.name} class="rule-field"><label for=${id}><code>${key.name}</code> <span class="note">${key.help}</span></label>
        <${Control} id=${id} field=${key} value=${value} disabled=${why !== ""} describedby=${`${id}-fault`} invalid=${fault !== ""} change=${put} />
        <span class="failed" id=${`${id}-fault`}>${fault}</span></div>`;
    })}</div>
    <p class="failed">${[...own, ...unknown.map((fault) => `${fault.path.slice(path.length + 1)}: ${fault.reason}`)].join("; ")}</p>
    ${why ? null : html`<div class="orders">
      ${index > 0 ? html`<button type="button" aria-label=${`Move ${title} up`} onClick=${() => move(index - 1)}>Up</button>` : null}
      ${last ? null : html`<button type="button" aria-label=${`Move ${title} down`} onClick=${() => move(index + 1)}>Down</button>`}
      <button type="button" class="danger" aria-label=${`Remove ${title}`} onClick=${remove}>Remove</button></div>`}
  </fieldset>`;
}
