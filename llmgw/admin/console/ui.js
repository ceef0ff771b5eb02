// The pieces that every page is made of. All data goes into the page as text; nothing here makes HTML of it.
import { Component, createRef, h } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";
import { isStale, look, state } from "./live.js";
import { mayOrder, order } from "./api.js";

export const html = htm.bind(h);
export { Component, createRef };

// A state is told by its word and a shape; the colour only repeats it.
const TONES = {
  ready: "good", well: "good", info: "plain", degraded: "warn", loading: "busy", starting: "busy", pending: "busy", waiting: "busy", draining: "warn",
  failed: "bad", lost: "bad", unknown: "warn", stopped: "plain", warning: "warn", error: "bad", debug: "plain",
  no_capacity: "bad", unreachable: "bad", held: "warn",
  in_force: "good", rolling_out: "busy", restarting: "busy", restart: "warn", refused: "bad", frozen: "bad", paused: "warn",
};
const LONG = 24; // characters
const SHAPES = { good: "●", warn: "▲", bad: "■", busy: "◌", plain: "○" };

export const tone = (word) => TONES[word] ?? "plain";

export function Badge({ word }) {
  const kind = tone(word);
  return html`<span class="badge ${kind}"><span aria-hidden="true">${SHAPES[kind]}</span> ${text(word)}</span>`;
}

export const text = (value) => value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value).replaceAll("_", " ");

export function duration(seconds) { // its words stay on one line
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}\u00a0s`;
  if (s < 3600) return `${Math.floor(s / 60)}\u00a0min\u00a0${s % 60}\u00a0s`;
  if (s < 86400) return `${Math.floor(s / 3600)}\u00a0h\u00a0${Math.floor((s % 3600) / 60)}\u00a0min`;
  return `${Math.floor(s / 86400)}\u00a0d\u00a0${Math.floor((s % 86400) / 3600)}\u00a0h`;
}

const two = (number) => String(number).padStart(2, "0");
export const clock = (ms) => { const d = new Date(ms); return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`; };
export const day = (ms) => { const d = new Date(ms); return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`; };

/** A moment: the time of today, with the day where it was another. */
export function When({ at }) {
  const ms = Date.parse(at);
  if (Number.isNaN(ms)) return html`<span>unknown</span>`;
  const shown = day(ms) === day(Date.now()) ? clock(ms) : `${day(ms)} ${clock(ms)}`;
  return html`<time datetime=${at} title=${`${day(ms)} ${clock(ms)} (${Intl.DateTimeFormat().resolvedOptions().timeZone})`}>${shown}</time>`;
}

/** An age as it was when the state was read, plus what has passed since. */
export const ageNow = (age_s) => age_s + (state.snapshot ? (Date.now() - state.snapshot.at) / 1000 : 0);

export const mib = (value) => value >= 10_240 ? `${(value / 1024).toFixed(0)} GiB` : value >= 1024 ? `${(value / 1024).toFixed(1)} GiB` : `${value} MiB`;

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
export const path = (...parts) => parts.map(encodeURIComponent).join("/");

/** A table that a narrow window shows as cards: each cell carries the name of its column. Rows: { key, cells }. */
export function Table({ caption, columns, rows, empty }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<table>
    <caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map((column) => html`<th scope="col" key=${column}>${column}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>${row.cells.map((cell, index) => index === 0
      ? html`<th scope="row" data-column=${columns[0]}>${cell}</th>`
      : html`<td data-column=${columns[index]} class=${cellClass(cell)}>${cell}</td>`)}</tr>`)}</tbody>
  </table>`;
}

// Words break only where they are too long for any column; then anywhere.
const cellClass = (cell) => cell === "" || cell === null ? "blank" : typeof cell === "string" && cell.length > LONG ? "long" : "";

export function Section({ title, children, side }) {
  return html`<section class="panel" aria-label=${title}><header class="panel-head"><h2>${title}</h2>${side ?? null}</header>${children}</section>`;
}

export function Bar({ used, total, label }) {
  const share = total > 0 ? Math.min(1, used / total) : 0;
  return html`<span class="bar-row"><meter class="bar" min="0" max="1" value=${share} aria-label=${label}></meter><span class="num">${mib(used)} of ${mib(total)}</span></span>`;
}

/** A button that gives an order; says what came of it beside itself. With `sure`, it asks once more in its own place.
 *  The keyboard's focus goes into the question and back, and to the page where the button goes with its order. */
export class Order extends Component {
  constructor() {
    super();
    this.state = { asking: false, busy: false, told: "", failed: false };
    this.whole = createRef();
    this.place = createRef(); // the button, or the question in its place
  }
  componentDidMount() { if (this.props.handle) this.props.handle.current = this; } // so that a form around it may press it
  press() {
    if (this.state.busy || this.props.disabled) return;
    if (this.props.sure) this.ask(true);
    else this.run();
  }
  ask(asking) {
    this.setState({ asking, told: "" }, () => this.place.current?.focus());
  }
  async run() {
    const had = this.hasFocus();
    this.setState({ asking: false, busy: true, told: "", failed: false }, () => { if (had) this.place.current?.focus(); });
    try {
      const { method = "POST", to, body, headers } = this.props;
      const answer = await order(method, to, body, headers);
      this.setState({ busy: false, told: this.props.done ?? text(answer.change ?? "done") });
      look();
      this.props.after?.(answer);
    } catch (err) {
      this.setState({ busy: false, told: err.message, failed: true });
    }
  }
  hasFocus() { return this.whole.current?.contains(document.activeElement) ?? false; }
  componentWillUnmount() {
    if (this.hasFocus()) setTimeout(() => { if (document.activeElement === document.body) document.getElementById("main")?.focus({ preventScroll: true }); });
  }
  render({ label, sure, disabled, name }, { asking, busy, told, failed }) {
    if (!mayOrder()) return null;
    const unready = busy || disabled; // told to readers, and not by `disabled`, which would throw the focus out
    return html`<span class="order" ref=${this.whole}>
      ${asking
        ? html`<span key="question" class="sure" role="group" tabindex="-1" ref=${this.place} aria-label=${`${label}: are you sure?`} onKeyDown=${(e) => { if (e.key === "Escape") this.ask(false); }}>${sure} <button class="danger" type="button" onClick=${() => this.run()}>Yes, ${label.toLowerCase()}</button> <button type="button" onClick=${() => this.ask(false)}>No</button></span>`
        : html`<button key="button" type="button" ref=${this.place} aria-disabled=${unready ? "true" : null} aria-label=${name ?? label} onClick=${() => this.press()}>${label}</button>`}
      <span class=${failed ? "told failed" : "told"} role="status">${told}</span>
    </span>`;
  }
}

/** How fresh the page is. The words are in a live region only where they are a warning. */
export function Freshness() {
  const at = state.snapshot?.at;
  if (at === undefined) return html`<span class="fresh">${state.problem || "Connecting …"}</span>`;
  if (isStale()) return null;
  const how = { live: "Live", polling: "Live every 5 s", interrupted: "Interrupted, trying again" }[state.connection] ?? "Connecting …";
  return html`<span class="fresh ${state.connection}" data-connection=${state.connection} data-role=${state.role} title=${state.problem || null}><span aria-hidden="true" class="pulse"></span>${how}</span>`;
}

export function StaleBanner() {
  return html`<div role="alert">${isStale() ? html`<p class="stale">Not updated since ${clock(state.snapshot.at)}${state.problem ? `: ${state.problem}` : ""}. What follows is what was known then.</p>` : null}</div>`;
}
