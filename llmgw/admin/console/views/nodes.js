// The machines, the memory of their devices, and the three orders a node takes.
import { state } from "../live.js";
import { Badge, Bar, Order, Section, ageNow, duration, html, mib, path } from "../ui.js";
import { nodeWord } from "./overview.js";

export function Nodes() {
  const { nodes } = state.snapshot.status;
  if (!nodes.length) return html`<h1>Nodes</h1><p class="empty">No node yet. llmgw node add prints the command for a new machine.</p>`;
  return html`<h1>Nodes</h1>${nodes.map((node) => html`<${Node} key=${node.id} node=${node} />`)}`;
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
