// The history of what the cluster did and why, the newest first.
import { state } from "../live.js";
import { Component, Section, html } from "../ui.js";
import { EventList } from "./overview.js";

export class Events extends Component {
  constructor() {
    super();
    this.state = { wanted: "", grave: false };
  }
  render(_, { wanted, grave }) {
    const word = wanted.trim().toLowerCase();
    const shown = state.events.filter((event) => (!grave || event.level === "warning" || event.level === "error")
      && `${event.kind} ${event.object} ${event.text}`.toLowerCase().includes(word)).reverse();
    return html`
      <h1>Events</h1>
      <${Section} title="What happened" side=${html`<span class="orders"><label class="filter">Filter <input type="search" value=${wanted} onInput=${(e) => this.setState({ wanted: e.target.value })} placeholder="kind, object or words" /></label>
        <label class="tick"><input type="checkbox" checked=${grave} onChange=${(e) => this.setState({ grave: e.target.checked })} /> Warnings only</label></span>`}>
        ${shown.length || !state.events.length ? html`<${EventList} events=${shown} objects />` : html`<p class="empty">No event matches.</p>`}
        <p class="count">The last ${state.events.length} events. All of them: llmgw ctl events.</p>
      <//>`;
  }
}
