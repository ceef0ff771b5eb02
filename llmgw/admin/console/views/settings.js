// The cluster settings: as a form, as text, their history and their roll-out. What is changed is looked at once more before it is saved.
import { state } from "../live.js";
import { Badge, Component, Section, When, counted, createRef, html } from "../ui.js";
import { backToEditing, desk, discard, inFile, isDirty, refresh, review, save, setReason, toForm, watch, whyReadOnly } from "../settings.js";
import { Changes } from "./settings_changes.js";
import { Form } from "./settings_form.js";
import { History } from "./settings_history.js";
import { Rollout, standing } from "./settings_rollout.js";
import { Toml } from "./settings_toml.js";

export const TITLES = { toml: "Settings as text", history: "History of settings", rollout: "Roll-out of settings" };
const VIEWS = [["", "Form"], ["toml", "TOML"], ["history", "History"], ["rollout", "Roll-out"]];

export class Settings extends Component {
  constructor() {
    super();
    this.form = createRef();
    this.toml = createRef();
    this.note = createRef();
    this.step = createRef();
    this.had = { checks: desk.checks, review: null, failed: desk.failed, told: desk.told };
    this.before = null;
  }
  componentDidMount() {
    this.unwatch = watch(() => this.forceUpdate());
    this.readAt = state.snapshot.at;
    refresh();
    this.entered();
  }
  componentWillUnmount() { this.unwatch(); }
  /** Before the form is put away: where the keyboard is. */
  componentWillUpdate() {
    if (desk.review && !this.had.review) this.before = document.activeElement;
  }
  componentDidUpdate(before) {
    if (state.snapshot && state.snapshot.at !== this.readAt && !document.hidden) { // whatever made the page look again concerns us too
      this.readAt = state.snapshot.at;
      refresh();
    }
    if (before.view !== this.props.view) this.entered();
    this.lookAt();
  }

  /** The form shows edits that were made as text, once the server has read them. */
  entered() {
    if (this.props.view === "" && desk.lead === "toml" && desk.schema) toForm();
  }

  /** What a check or a save brought is where the eyes and the keyboard's focus go. */
  lookAt() {
    const { had } = this;
    this.had = { review: desk.review, checks: desk.checks, failed: desk.failed, told: desk.told };
    if (desk.review && desk.review !== had.review) this.step.current?.focus();
    else if (desk.checks !== had.checks && desk.faults.length) this.goTo(desk.faults[0]);
    else if (had.review && !desk.review && !desk.told && !desk.failed) this.before?.focus(); // back to where it was asked for
    else if ((desk.failed && desk.failed !== had.failed) || (desk.told && desk.told !== had.told)) this.note.current?.focus();
  }

  goTo(fault) {
    if (this.props.view === "toml") this.toml.current?.goTo(fault);
    else if (this.props.view === "" && desk.lead === "form") this.form.current?.seek(fault.path);
    else this.note.current?.focus();
  }

  render({ view }) {
    const ready = desk.newest && desk.schema;
    return html`
      <h1>Settings</h1>
      ${ready ? html`<${Standing} />` : null}
      <nav class="tabs" aria-label="Views of the settings"><ul>${VIEWS.map(([name, title]) => html`<li key=${name}><a href=${name ? `#/settings/${name}` : "#/settings"} aria-current=${name === view ? "page" : null}>${title}</a></li>`)}</ul></nav>
      ${desk.problem && !ready ? html`<p class="empty" role="status">The settings cannot be read: ${desk.problem}</p>` : null}
      ${ready ? this.view(view) : desk.problem ? null : html`<p class="empty" role="status">Reading the settings …</p>`}`;
  }

  view(view) {
    if (view === "history") return html`<${History} />`;
    if (view === "rollout") return html`<${Rollout} />`;
    const why = whyReadOnly();
    const asText = view === "" && desk.lead === "toml";
    return html`
      ${why ? html`<p class="read-only" role="note">${why}</p>` : null}
      <div class="notes" ref=${this.note} tabindex="-1"><p class="told" role="status">${desk.told}</p><p class="failed-note" role="alert">${desk.failed}</p></div>
      <${Meanwhile} />
      <${Faults} go=${(fault) => this.goTo(fault)} />
      ${desk.review ? html`<${Review} step=${this.step} />` : null}
      <div hidden=${desk.review !== null}>${asText ? html`<${AsText} />` : view === "toml" ? html`<${Toml} handle=${this.toml} why=${why} />` : html`<${Form} handle=${this.form} />`}</div>
      ${why || desk.review ? null : html`<${Draft} />`}`;
  }
}

/** Which version there is and how far it has come, in a line. */
function Standing() {
  const { newest } = desk;
  if (inFile()) return html`<p class="standing">They stand in this machine's file and have no versions.</p>`;
  const { word, told } = standing();
  return html`<p class="standing"><strong>Version ${newest.version}</strong>${newest.author ? ` by ${newest.author}` : ""}${newest.created_at ? html`, <${When} at=${newest.created_at} />` : null}${newest.reason ? html` <q>${newest.reason}</q>` : null}
    <span class="standing-now"><span role="status"><${Badge} word=${word} /></span> ${told}</span></p>`;
}

/** What was saved by others since these edits began. */
function Meanwhile() {
  const behind = isDirty() && desk.newest.version > desk.base.version;
  if (!desk.meanwhile && behind) return html`<p class="meanwhile" role="status">Version ${desk.newest.version}${desk.newest.author ? ` by ${desk.newest.author}` : ""} was saved while you were editing. Your changes are kept; Review puts them on that version and shows what others changed.</p>`;
  if (!desk.meanwhile) return null;
  const { from, to, author, reason, changes, both } = desk.meanwhile;
  return html`<${Section} title=${`What changed meanwhile: version ${to}${author ? ` by ${author}` : ""}`}>
    ${reason ? html`<p><q>${reason}</q></p>` : null}
    <${Changes} changes=${changes} both=${both} caption=${`Changes from version ${from} to version ${to}`} />
    <p class="note">Your own changes are kept and now stand on version ${to}.</p>
  <//>`;
}

function Faults({ go }) {
  if (!desk.faults.length) return null;
  return html`<section class="panel faults" aria-label="What is wrong"><header class="panel-head"><h2>${counted(desk.faults.length, "fault")}: nothing was saved</h2></header>
    <ul class="problems">${desk.faults.map((fault) => html`<li key=${`${fault.path} ${fault.reason}`}>${fault.path ? html`<button type="button" class="quiet to-fault" onClick=${() => go(fault)}><code>${fault.path}</code></button>: ` : null}${fault.reason}</li>`)}</ul></section>`;
}

/** The form, while the text says what no form can show. */
function AsText() {
  return html`<section class="panel" aria-label="Changed as text"><p>${desk.busy || "The text holds changes that are not valid yet, so the form cannot show them. Nothing is lost."}</p>
    <p class="orders"><a href="#/settings/toml">Go on in the text</a> <button type="button" onClick=${discard}>Discard the changes</button></p></section>`;
}

/** What waits to be saved, always in sight. */
class Draft extends Component {
  constructor() {
    super();
    this.state = { asking: false };
    this.place = createRef();
  }
  ask(asking) { this.setState({ asking }, () => this.place.current?.focus()); }
  render(_, { asking }) {
    if (!isDirty()) return null;
    const what = desk.lead === "toml" ? "Unsaved changes in the text" : counted(desk.edits.size, "unsaved change");
    return html`<section class="draft" aria-label="Unsaved changes"><strong>${what}</strong> <span class="note" role="status">${desk.busy}</span>
      <span class="orders"><button type="button" class="main" aria-disabled=${desk.busy ? "true" : null} onClick=${review}>Review</button>
      ${asking ? html`<span key="question" class="sure" role="group" tabindex="-1" ref=${this.place} aria-label="Discard: are you sure?" onKeyDown=${(e) => { if (e.key === "Escape") this.ask(false); }}>All of them? <button type="button" class="danger" onClick=${() => { this.setState({ asking: false }); discard(); document.getElementById("main")?.focus({ preventScroll: true }); }}>Yes, discard</button> <button type="button" onClick=${() => this.ask(false)}>No</button></span>`
        : html`<button key="button" type="button" ref=${this.place} onClick=${() => this.ask(true)}>Discard</button>`}</span></section>`;
  }
}

/** The last look: what saving does, why, and the order itself. */
function Review({ step }) {
  const { changes, restart, warnings } = desk.review;
  return html`<section class="panel review" aria-label="Review" tabindex="-1" ref=${step} onKeyDown=${(e) => { if (e.key === "Escape") backToEditing(); }}>
    <header class="panel-head"><h2>Review: ${counted(changes.length, "change")} to version ${desk.base.version}</h2></header>
    <${Changes} changes=${changes} both=${desk.meanwhile?.both ?? []} caption="What saving changes" empty=${`This is what version ${desk.base.version} says already; there is nothing to save.`} />
    ${restart.length ? html`<p class="why">Control planes restart one after another for ${restart.map((path, index) => html`${index ? ", " : ""}<code key=${path}>${path}</code>`)}. Requests and running models are not touched.</p>` : null}
    ${warnings.length ? html`<ul class="warnings">${warnings.map((warning) => html`<li key=${warning}>${warning}</li>`)}</ul>` : null}
    ${changes.length ? html`<form class="fields" onSubmit=${(e) => { e.preventDefault(); save(); }}>
      <label>Why (for the history)<input type="text" id="reason" maxlength="1000" value=${desk.reason} autocomplete="off" onInput=${(e) => setReason(e.target.value)} /></label>
      <p class="orders"><button type="submit" class="main" aria-disabled=${desk.busy ? "true" : null}>Save</button><button type="button" onClick=${backToEditing}>Back to editing</button><span class="note" role="status">${desk.busy}</span></p>
    </form>` : html`<p class="orders"><button type="button" onClick=${backToEditing}>Back to editing</button> <button type="button" onClick=${discard}>Discard the changes</button></p>`}
  </section>`;
}
