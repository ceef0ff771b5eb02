// The machines, the memory of their devices, and the three orders a node takes.
import { state } from "../live.js";
import { Badge, Bar, Component, Order, Section, ageNow, counted, duration, html, mib, path } from "../ui.js";
import { nodeWord } from "./overview.js";

const SHOWN = 50; // nodes at once: each is a panel; the filter finds the others

export class Nodes extends Component {
  constructor() {
    super();
    this.state = { wanted: "" };
  }
  render(_, { wanted }) {
    const { nodes } = state.snapshot;
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const described = (node) => `${node.name} ${nodeWord(node)} ${node.facility} ${node.address} ${Object.entries(node.labels).map((one) => one.join("="))}`.toLowerCase();
    const found = nodes.filter((node) => words.every((word) => described(node).includes(word)));
    return html`
      <h1>Nodes</h1>
      ${nodes.length ? html`<div class="page-tools"><p class="count" role="status">${found.length === nodes.length ? counted(nodes.length, "node") : `${found.length} of ${counted(nodes.length, "node")}`}</p>
        <label class="filter">Filter <input type="search" value=${wanted} onInput=${(e) => this.setState({ wanted: e.target.value })} placeholder="name, state, facility or label" /></label></div>`
        : html`<section class="panel"><p class="empty">No node yet. An agent makes a machine one: llmgw agent --config FILE</p></section>`}
      ${found.slice(0, SHOWN).map((node) => html`<${Node} key=${node.id} node=${node} />`)}
      ${found.length > SHOWN ? html`<p class="count">The first ${SHOWN} are shown; the filter finds the others.</p>` : null}`;
  }
}

function Node({ node }) {
  const name = path(node.name);
  const facts = [
    ["State", html`<${Badge} word=${nodeWord(node)} />`], ["Heard", `${duration(ageNow(node.heard_age_s))} ago`], ["Replicas", String(node.replicas)],
    ["Facility", node.facility || "none"], ["Address", node.address], ["Build", node.build || "unknown"],
    ["CPUs", String(node.cpus)], ["Memory", mib(node.memory_mib)], ["Disk free", mib(node.disk_free_mib)],
    ["Engines", node.engines.map((engine) => `${engine.name} ${engine.version}`.trim()).join(", ") || "none found"],
  ];
  const labels = Object.entries(node.labels);
  return html`<${Section} title=${node.name} side=${html`<span class="orders">
      ${node.cordoned || node.draining ? html`<${Order} label="Resume" name=${`Resume ${node.name}`} to=${`nodes/${name}/resume`} />` : html`<${Order} label="Cordon" name=${`Cordon ${node.name}`} to=${`nodes/${name}/cordon`} />`}
      ${node.draining ? null : html`<${Order} label="Drain" name=${`Drain ${node.name}`} to=${`nodes/${name}/drain`} body=${{}} sure="Its replicas move elsewhere." />`}</span>`}>
    <dl class="facts">${facts.map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>
    ${labels.length ? html`<p class="labels">${labels.map(([key, value]) => html`<span class="label" key=${key}>${key}=${value}</span> `)}</p>` : null}
    <ul class="devices">${node.devices.map((device) => html`<li key=${device.id}>
      <span class="device">${device.kind === "gpu" ? `GPU ${device.index}` : "CPU"}${device.name ? ` · ${device.name}` : ""}</span>
      ${device.known && device.total_mib ? html`<${Bar} used=${device.used_mib} total=${device.total_mib} label=${`memory of ${device.kind} ${device.index}`} />` : html`<span class="note">memory not known</span>`}
    </li>`)}</ul>
  <//>`;
}
