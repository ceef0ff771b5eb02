// Every replica; and one of them: its states over time, its engine's log as it grows, and why it is where it is.
import { replicaOf, state } from "../live.js";
import { ApiError, read } from "../api.js";
import { Badge, Component, Order, Section, Table, ageNow, counted, duration, html, link, mib, path, text } from "../ui.js";
import { EventList } from "./overview.js";

export class Replicas extends Component {
  constructor() {
    super();
    this.state = { wanted: "" };
  }
  render(_, { wanted }) {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const all = state.snapshot.replicas;
    const shown = all.filter((one) => words.every((word) => `${one.id} ${one.model} ${one.node} ${one.state} ${one.engine}`.toLowerCase().includes(word)));
    return html`
      <h1>Replicas</h1>
      <${Section} title="Running copies of models" side=${html`<label class="filter">Filter <input type="search" value=${wanted} onInput=${(e) => this.setState({ wanted: e.target.value })} placeholder="model, node or state" /></label>`}>
        <p class="count" role="status">${shown.length === all.length ? counted(all.length, "replica") : `${shown.length} of ${counted(all.length, "replica")}`}</p>
        <${Table} caption="Replicas" columns=${["Replica", "Model", "State", "For", "Node", "Devices", "Attempt", "Why"]}
          empty=${all.length ? "No replica matches." : "No replica yet. A model that is applied gets its replicas here."}
          rows=${shown.slice(0, 500).map((one) => ({ key: one.id, cells: [
            html`<a href=${link("replicas", one.id)}>${one.id}</a>`, one.model, html`<${Badge} word=${one.state} />`, duration(ageNow(one.age_s)),
            one.node, one.gpus.join(", "), String(one.attempt), one.reason] }))} />
        ${shown.length > 500 ? html`<p class="count">The first 500 are shown; the filter finds the others.</p>` : null}
      <//>`;
  }
}

/** One replica. Made anew for each id (its key), so that nothing of another one can be left in it. */
export class Replica extends Component {
  constructor() {
    super();
    this.state = { events: null, why: null, whyNot: "", problem: "" };
    this.seen = "";
  }
  componentDidMount() { this.load(); }
  componentDidUpdate() { this.load(); }
  componentWillUnmount() { this.gone = true; }

  async load() {
    const { id } = this.props;
    const one = replicaOf(id);
    const latest = state.events.findLast((event) => event.object === `replica/${id}`);
    const seen = `${one?.state} ${one?.attempt} ${one?.reason} ${latest?.seq}`; // reasons and history change with these
    if (seen === this.seen) return;
    this.seen = seen;
    const [events, why] = await Promise.allSettled([
      read(`events?limit=200&object=${encodeURIComponent(`replica/${id}`)}`),
      read(`explain/replica/${encodeURIComponent(id)}`),
    ]);
    if (this.gone) return;
    this.setState({
      events: events.status === "fulfilled" ? events.value.events : this.state.events,
      why: why.status === "fulfilled" ? why.value : null,
      whyNot: why.status === "fulfilled" ? "" : why.reason instanceof ApiError && why.reason.status === 404 ? "The plan no longer speaks of it." : `It cannot be read: ${why.reason.message}`,
      problem: events.status === "rejected" ? events.reason.message : "",
    });
  }

  render({ id }, { events, why, whyNot, problem }) {
    const one = replicaOf(id);
    const never = !one && events?.length === 0;
    return html`
      <nav class="crumbs" aria-label="Where you are"><a href="#/replicas">Replicas</a> <span aria-hidden="true">/</span> <span>${id}</span></nav>
      <h1>${id}</h1>
      ${one ? html`<${Facts} one=${one} />` : html`<p class="empty" role="status">${never ? "There is no such replica, and the history knows of none." : events ? "This replica is gone. What is known of it stands below." : problem || "Reading …"}</p>`}
      ${never ? null : html`<div class="columns">
        <${Section} title="Why it is where it is">
          ${why ? html`<p class="why">${why.text}</p>${why.rejections.length ? html`<${Rejections} rows=${why.rejections} />` : null}`
            : html`<p class="empty">${one ? whyNot || "Reading …" : "The plan no longer speaks of it."}</p>`}
        <//>
        <${Section} title="States over time">
          ${events ? html`<${EventList} events=${[...events].reverse()} />` : html`<p class="empty">${problem || "Reading …"}</p>`}
        <//>
      </div>
      <${Section} title="Log of its engine">${one ? html`<${Log} key=${id} id=${id} attempt=${one.attempt} />` : html`<p class="empty">The log went with the replica.</p>`}<//>`}`;
  }
}

function Facts({ one }) {
  const facts = [
    ["Model", html`<a href=${link("models", one.model)}>${one.model}</a>`], ["State", html`<${Badge} word=${one.state} /> for ${duration(ageNow(one.age_s))}`],
    ["Node", one.node], ["Devices", one.gpus.join(", ") || "none"], ["Engine", `${one.engine} (profile ${one.profile})`],
    ["Attempt", one.failure ? `${one.attempt}, ${one.tries} of ${one.tries_max} in a row; the one before: ${one.failure}` : String(one.attempt)], ["Process", one.pid ? String(one.pid) : "none"], ["Memory", one.memory_mib ? mib(one.memory_mib) : "not measured yet"],
    ["Requests", one.running === null ? "not told" : `${one.running} in the engine`], ["Gets requests", one.in_rotation ? "yes" : "no"],
  ];
  return html`<${Section} title="Now" side=${html`<span class="orders">
      <${Order} label="Restart" to=${`replicas/${path(one.id)}/restart`} sure="It stops at once; requests on it end." />
      <${Order} label="Drain" to=${`replicas/${path(one.id)}/drain`} sure="Another takes its place first." /></span>`}>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${one.reason ? html`<p class="why">${one.reason}</p>` : null}
  <//>`;
}

export function Rejections({ rows }) {
  return html`<${Table} caption="Nodes that were passed over" columns=${["Node", "Filter", "Why not"]} empty=""
    rows=${rows.map((row, index) => ({ key: index, cells: [row.node, text(row.filter), row.text] }))} />`;
}

const LOG_MS = 1_000;
const LOG_RETRY_MS = 3_000;
const CHARACTERS_KEPT = 400_000; // some 4,000 lines: what a browser lays out without a pause

/** The log of one replica, from a while ago on. It follows its end unless the reader has scrolled up. */
class Log extends Component {
  constructor() {
    super();
    this.state = { lines: "", attempts: [], chosen: 0, shown: 0, following: true, problem: "" };
    this.offset = null;
    this.pane = null;
    this.turn = 0;
    this.bind = (pane) => { this.pane = pane; };
  }
  componentDidMount() { this.follow(); }
  componentWillUnmount() { this.turn += 1; clearTimeout(this.timer); this.abort?.abort(); }
  componentDidUpdate() { if (this.state.following && this.pane) this.pane.scrollTop = this.pane.scrollHeight; }

  /** Begins anew, with another attempt or at the start. What an earlier turn still gets is thrown away. */
  follow(chosen = this.state.chosen) {
    this.turn += 1;
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.offset = null;
    this.attempt = chosen;
    this.setState({ lines: "", shown: 0, chosen, following: true, problem: "" });
    this.next(this.turn);
  }

  async next(turn) {
    const { id } = this.props;
    let wait = LOG_MS;
    if (!document.hidden) {
      try {
        const from = this.offset === null ? "" : `&offset=${this.offset}`;
        const part = await read(`replicas/${encodeURIComponent(id)}/logs?attempt=${this.attempt}${from}`, this.abort.signal);
        if (turn !== this.turn) return;
        if (part.replica === id) wait = this.take(part);
      } catch (err) {
        if (turn !== this.turn) return;
        this.setState({ problem: err.message });
        wait = LOG_RETRY_MS;
      }
    }
    this.timer = setTimeout(() => this.next(turn), wait);
  }

  take(part) {
    const newest = part.attempts.length ? Math.max(...part.attempts) : part.attempt;
    let fresh = part.text;
    if (this.offset === null && part.offset > 0) fresh = fresh.slice(fresh.indexOf("\n") + 1); // it begins within a line
    this.offset = part.next_offset;
    this.attempt = part.attempt;
    let lines = this.state.lines;
    fresh = fresh.replace(/\r\n?/g, "\n");
    const grown = part.text !== "";
    if (this.state.chosen === 0 && !grown && newest > part.attempt) { // the engine was started again: go on with its new log
      this.attempt = newest;
      this.offset = 0;
      lines += `${lines && !lines.endsWith("\n") ? "\n" : ""}--- attempt ${newest} ---\n`;
    }
    lines = (lines + fresh).slice(-CHARACTERS_KEPT);
    if (lines !== this.state.lines || this.state.problem || this.state.shown !== this.attempt || this.state.attempts.length !== part.attempts.length)
      this.setState({ lines, attempts: part.attempts, shown: this.attempt, problem: "" });
    return grown && part.text.length > 60_000 ? 0 : LOG_MS;
  }

  scrolled() {
    const pane = this.pane;
    if (!pane) return; // the browser tells of it a moment later, when another page may be shown
    const following = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 8;
    if (following !== this.state.following) this.setState({ following });
  }

  render({ id }, { lines, attempts, chosen, shown, following, problem }) {
    return html`
      <div class="log-tools">
        <label>Attempt <select value=${String(chosen)} onChange=${(e) => this.follow(Number(e.target.value))}>
          <option value="0">newest${shown ? ` (${shown})` : ""}</option>
          ${[...attempts].reverse().map((one) => html`<option key=${one} value=${String(one)}>${one}</option>`)}
        </select></label>
        <span class="log-state" role="status">${problem ? `No news: ${problem}` : following ? "Following" : "Paused, because you have scrolled up"}</span>
        ${following ? null : html`<button type="button" onClick=${() => this.setState({ following: true }, () => this.pane?.focus())}>Go to the end</button>`}
      </div>
      <pre class="log" tabindex="0" role="region" aria-label=${`Log of ${id}`} data-replica=${id} ref=${this.bind} onScroll=${() => this.scrolled()}>${lines || (problem ? "" : shown ? "Nothing was written yet." : "Reading …")}</pre>`;
  }
}
