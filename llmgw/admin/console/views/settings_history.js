// Every version there was: who wrote it and why, who runs it, who refused it; what differs between any two; and the way back.
import { order, read, readExactly, freshKey } from "../api.js";
import { look } from "../live.js";
import { Badge, Component, Section, Table, When, counted, createRef, html } from "../ui.js";
import { desk, inFile, refresh, whyReadOnly } from "../settings.js";
import { Changes } from "./settings_changes.js";

const PAGE = 50;
const PAGE_MAX = 150; // that are read again at once when something changes; what is older is a press away

export class History extends Component {
  constructor() {
    super();
    this.state = { versions: null, next: null, problem: "", from: 0, to: 0, compared: null, back: null, reason: "", busy: false, told: "", failed: "", faults: [] };
    this.panel = createRef();
    this.note = createRef();
  }
  componentDidMount() { this.load(); }
  componentDidUpdate() { this.load(); }
  componentWillUnmount() { this.gone = true; }

  /** Read again when there is a newer version, or when somebody runs or refuses another one. */
  async load() {
    const seen = JSON.stringify([desk.newest.version, desk.newest.held, desk.newest.control_planes.map((plane) => [plane.name, plane.applied, plane.refused])]);
    if (seen === this.seen) return;
    this.seen = seen;
    try {
      const page = await read(`settings/history?limit=${Math.max(PAGE, Math.min(PAGE_MAX, this.state.versions?.length ?? 0))}`);
      if (!this.gone) this.setState({ versions: page.versions, next: page.next, problem: "" });
    } catch (err) {
      if (!this.gone) this.setState({ problem: err.message });
    }
  }

  async more() {
    try {
      const page = await read(`settings/history?limit=${PAGE}&cursor=${encodeURIComponent(this.state.next)}`);
      if (!this.gone) this.setState({ versions: [...this.state.versions, ...page.versions], next: page.next });
    } catch (err) {
      if (!this.gone) this.setState({ problem: err.message });
    }
  }

  async compare(from, to) {
    this.setState({ from, to, back: null, told: "", failed: "", faults: [] });
    try {
      const compared = await readExactly(`settings/diff?from=${from}&to=${to}`);
      if (!this.gone && this.state.from === from && this.state.to === to) this.setState({ compared }, () => this.panel.current?.focus());
    } catch (err) {
      if (!this.gone) this.setState({ compared: null, failed: err.message }, () => this.note.current?.focus());
    }
  }

  /** What the way back would change, before it is gone. */
  async lookBack(version) {
    await this.ask(version, "settings/rollback?dry_run=true", {}, (answer) => {
      this.setState({ back: { version, base: answer.version, answer, key: freshKey() }, compared: null }, () => this.panel.current?.focus());
    });
  }

  async goBack() {
    const { version, key } = this.state.back;
    await this.ask(version, "settings/rollback", { "idempotency-key": key }, (answer) => {
      this.setState({ back: null, reason: "", told: answer.changes.length ? `Version ${answer.version} now says what version ${version} said.` : `Version ${answer.version} says that already.` }, () => this.note.current?.focus());
      refresh();
      look();
    });
  }

  async ask(version, path, headers, done) {
    if (this.state.busy) return;
    this.setState({ busy: true, told: "", failed: "", faults: [] });
    const base = this.state.back?.base ?? desk.newest.version;
    const reason = this.state.reason.trim();
    try {
      const answer = await order("POST", path, { version, reason }, { "if-match": `"${base}"`, ...headers }, JSON.parse);
      if (!this.gone) done(answer);
    } catch (err) {
      if (this.gone) return;
      const raced = err.status === 412;
      const failed = raced ? "Somebody has saved another version meanwhile. Nothing was changed; look at the newest first." : err.status ? err.message.split("\n")[0] : "The control plane did not answer. Ask again: it is carried out once.";
      this.setState({ failed, faults: err.faults ?? [], back: raced ? null : this.state.back }, () => this.note.current?.focus());
      if (raced) refresh();
    } finally {
      if (!this.gone) this.setState({ busy: false });
    }
  }

  render(_, { versions, next, problem, from, to, compared, back, reason, busy, told, failed, faults }) {
    if (inFile()) return html`<section class="panel"><p class="empty">${whyReadOnly()} A file has no history here.</p></section>`;
    const why = whyReadOnly();
    const newest = desk.newest.version;
    const numbers = (versions ?? []).map((one) => one.version);
    const left = from || numbers[1] || 0;
    const right = to || numbers[0] || 0;
    const choices = [...numbers, ...(next === null ? [0] : [])];
    const select = (label, value, change) => html`<label>${label} <select value=${String(value)} onChange=${(e) => change(Number(e.target.value))}>${choices.map((one) => html`<option key=${one} value=${String(one)}>${one || "0 (nothing set)"}</option>`)}</select></label>`;
    return html`
      <div class="notes" ref=${this.note} tabindex="-1"><p class="told" role="status">${told}</p><div role="alert">${failed ? html`<p class="failed-note">${failed}</p>` : null}
        ${faults.length ? html`<ul class="problems">${faults.map((fault) => html`<li key=${`${fault.path}${fault.reason}`}><code>${fault.path}</code>: ${fault.reason}</li>`)}</ul>` : null}</div></div>
      ${why ? html`<p class="read-only" role="note">${why}</p>` : null}
      ${back ? html`<section class="panel review" aria-label="Roll back" tabindex="-1" ref=${this.panel} onKeyDown=${(e) => { if (e.key === "Escape") this.setState({ back: null }); }}>
        <header class="panel-head"><h2>Back to version ${back.version}: ${counted(back.answer.changes.length, "change")} to version ${back.base}</h2></header>
        <${Changes} changes=${back.answer.changes} caption="What rolling back changes" empty="The newest version says the same." />
        ${back.answer.restart.length ? html`<p class="why">Control planes restart one after another for ${back.answer.restart.join(", ")}.</p>` : null}
        ${back.answer.warnings.length ? html`<ul class="warnings">${back.answer.warnings.map((one) => html`<li key=${one}>${one}</li>`)}</ul>` : null}
        <p class="note">No version is taken out of the history: what version ${back.version} says is written as a new one.</p>
        ${back.answer.changes.length ? html`<form class="fields" onSubmit=${(e) => { e.preventDefault(); this.goBack(); }}>
          <label>Why (for the history)<input type="text" id="reason" maxlength="1000" value=${reason} autocomplete="off" onInput=${(e) => this.setState({ reason: e.target.value })} /></label>
          <p class="orders"><button type="submit" class="main" aria-disabled=${busy ? "true" : null}>Roll back</button><button type="button" onClick=${() => this.setState({ back: null })}>Cancel</button></p></form>`
          : html`<button type="button" onClick=${() => this.setState({ back: null })}>Cancel</button>`}
      </section>` : null}
      ${compared ? html`<section class="panel" aria-label="Comparison" tabindex="-1" ref=${this.panel}>
        <header class="panel-head"><h2>From version ${compared.from} to version ${compared.to}</h2><button type="button" class="quiet" onClick=${() => this.setState({ compared: null })}>Close</button></header>
        <${Changes} changes=${compared.changes} caption=${`Changes from version ${compared.from} to version ${compared.to}`} empty="They say the same." />
      </section>` : null}
      <${Section} title="Versions" side=${numbers.length ? html`<form class="orders" onSubmit=${(e) => { e.preventDefault(); this.compare(left, right); }}>
          ${select("Compare", left, (value) => this.setState({ from: value }))} ${select("with", right, (value) => this.setState({ to: value }))} <button type="submit">Show</button></form>` : null}>
        <${Table} caption="Versions of the settings, the newest first" columns=${["Version", "When", "Author", "Why", "Changes", "Run by", "Refused by", ""]} empty=${problem || (versions ? "No version yet." : "Reading …")}
          rows=${(versions ?? []).map((one) => ({ key: one.version, cells: [
            html`<span>${one.version}${one.held ? html` <${Badge} word="held" />` : null}</span>`, one.created_at ? html`<${When} at=${one.created_at} />` : "", one.author, one.reason,
            html`<button type="button" class="quiet" aria-label=${`Changes of version ${one.version}`} onClick=${() => this.compare(one.parent, one.version)}>${one.changes}</button>`,
            one.applied_by.join(", "), html`<${Refused} one=${one} />`,
            one.version === newest ? "" : html`<button type="button" disabled=${why !== ""} title=${why || null} aria-label=${`Roll back to version ${one.version}`} onClick=${() => this.lookBack(one.version)}>Roll back</button>`] }))} />
        ${next ? html`<p><button type="button" onClick=${() => this.more()}>Older versions</button></p>` : null}
      <//>`;
  }
}

function Refused({ one }) {
  const now = desk.newest.control_planes.filter((plane) => plane.refused === one.version); // what was said since the leader kept it last
  const told = new Map([...one.refused_by, ...now].map((who) => [who.name, who.why]));
  const lines = [...[...told].map(([name, why]) => `${name}: ${why}`), ...(one.held ? [`held: ${one.why_held}`] : [])];
  return lines.length ? html`<ul class="plain">${lines.map((line) => html`<li key=${line}>${line}</li>`)}</ul>` : null;
}
