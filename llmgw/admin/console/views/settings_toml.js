// The document as text: read, copied and edited as a whole. The server alone reads TOML; a fault is shown at its line.
import { Component, html } from "../ui.js";
import { desk, review, setText, textShown } from "../settings.js";
import { lineOf } from "../settings_document.js";

const COPIED_MS = 2_000;

export class Toml extends Component {
  constructor() {
    super();
    this.state = { told: "" };
    this.bind = (field) => { this.field = field; };
    this.bindNumbers = (numbers) => { this.numbers = numbers; };
  }
  componentDidMount() {
    if (this.props.handle) this.props.handle.current = this;
    const fault = faultsOf()[0];
    if (fault) this.goTo(fault);
  }
  componentWillUnmount() { clearTimeout(this.timer); }

  /** Marks the line of a fault; a text without one gets the focus at its start. */
  goTo(fault) {
    const at = placeOf(fault);
    if (!this.field) return;
    const lines = this.field.value.split("\n");
    const start = lines.slice(0, Math.max(0, at - 1)).reduce((sum, line) => sum + line.length + 1, 0);
    this.field.focus();
    this.field.setSelectionRange(start, start + (at ? lines[at - 1]?.length ?? 0 : 0));
    this.field.scrollTop = Math.max(0, (at - 4)) * (this.field.scrollHeight / Math.max(1, lines.length));
    this.follow();
  }
  follow() { if (this.numbers && this.field) this.numbers.scrollTop = this.field.scrollTop; }

  async copy() {
    try {
      await navigator.clipboard.writeText(textShown());
    } catch { // not offered off loopback without TLS
      this.field.select();
      document.execCommand("copy");
    }
    this.setState({ told: "Copied" });
    this.timer = setTimeout(() => this.setState({ told: "" }), COPIED_MS);
  }

  render({ why }, { told }) {
    const text = textShown();
    const count = text.split("\n").length;
    const marked = new Map(faultsOf().map((fault) => [placeOf(fault), fault]));
    return html`<section class="panel" aria-label="The document as TOML">
      <header class="panel-head"><h2><label for="toml">The cluster's settings as TOML</label></h2><span class="orders"><span class="note" role="status">${told}</span><button type="button" onClick=${() => this.copy()}>Copy</button></span></header>
      <p class="note">What is set, and nothing else: a key that is taken out has its default again. Comments are not kept.</p>
      <div class="toml">
        <pre class="numbers" aria-hidden="true" ref=${this.bindNumbers}>${Array.from({ length: count }, (_, index) => html`<span key=${index} class=${marked.has(index + 1) ? "at-fault" : ""}>${index + 1}</span>`)}</pre>
        <textarea id="toml" ref=${this.bind} wrap="off" spellcheck=${false} autocomplete="off" autocapitalize="off" readonly=${why !== ""} value=${text} rows="24" aria-invalid=${marked.size ? "true" : null} aria-describedby="toml-faults"
          onScroll=${() => this.follow()} onInput=${(e) => setText(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey) && !why) review(); }}></textarea>
      </div>
      <ul class="problems" id="toml-faults">${[...marked].filter(([at]) => at).map(([at, fault]) => html`<li key=${at}><button type="button" class="quiet to-fault" onClick=${() => this.goTo(fault)}>Line ${at}</button>: ${fault.reason}</li>`)}</ul>
    </section>`;
  }
}

/** The faults of the last check: with their paths, or the one sentence about a text that is no TOML at all. */
const faultsOf = () => desk.faults.length ? desk.faults : /\bline \d+/.test(desk.failed) ? [{ path: "", reason: desk.failed }] : [];

function placeOf(fault) {
  const told = fault.path ? null : /\bline (\d+)/.exec(fault.reason);
  return told ? Number(told[1]) : fault.path ? lineOf(textShown(), fault.path) : 0;
}
