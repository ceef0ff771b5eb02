// Who leads, what needs a person, and how much of everything there is.
import { state } from "../live.js";
import { Badge, Section, Table, Bar, When, html, link, text, duration, ageNow } from "../ui.js";

const SHOWN = 20; // rows of a list here; what is not well comes first, and the rest has pages of its own
const unwellFirst = (rows, well) => [...rows.filter((row) => !well(row)), ...rows.filter(well)];
const rest = (all, page) => all.length > SHOWN ? html`<p class="count">${SHOWN} of ${all.length} are shown. <a href=${link(page)}>All of them</a></p>` : null;

const ORDER = ["ready", "loading", "starting", "pending", "draining", "stopped", "failed", "lost"];

export function Overview() {
  const { status, models, nodes, replicas } = state.snapshot;
  const counts = Object.entries(status.replicas).sort((a, b) => ORDER.indexOf(a[0]) - ORDER.indexOf(b[0]));
  const ready = models.filter((model) => model.state === "ready").length;
  const present = nodes.filter((node) => node.state === "ready").length;
  const running = replicas.reduce((sum, one) => sum + (one.running ?? 0), 0);
  const gpus = nodes.flatMap((node) => node.devices.filter((device) => device.kind === "gpu"));
  const leader = status.leader;
  const more = Math.max(0, status.problems.length - SHOWN) + (status.problems_more ?? 0);
  return html`
    <h1>Overview</h1>
    <div class="tiles">
      <${Tile} label="Leader" value=${leader.holder ?? "nobody"} tone=${leader.holder ? "" : "bad"} note=${leader.holder ? `epoch ${leader.epoch}, ${text(leader.power ?? "")}` : "nothing is placed, healed or changed"} />
      <${Tile} label="Models ready" value=${`${ready} of ${models.length}`} note=${`${status.router.endpoints} endpoints published`} />
      <${Tile} label="Replicas" value=${String(replicas.length)} note=${counts.map(([name, count]) => `${count} ${name}`).join(", ") || "none yet"} />
      <${Tile} label="Nodes" value=${`${present} of ${nodes.length}`} note=${gpus.length ? `${gpus.length} GPUs` : "CPU only"} tone=${present < nodes.length ? "warn" : ""} />
      <${Tile} label="Requests in engines" value=${String(running)} note="as the engines count them" />
    </div>
    <${Section} title="Needs attention">
      ${status.problems.length
        ? html`<ul class="problems">${status.problems.slice(0, SHOWN).map((problem) => html`<li key=${problem}>${problem}</li>`)}${more > 0 ? html`<li>and ${more} more</li>` : null}</ul>`
        : html`<p class="well"><${Badge} word="well" /> Nothing needs a person.</p>`}
    <//>
    <${Section} title="Models">
      <${Table} caption="Models" columns=${["Model", "State", "Ready", "Engine", "Why"]} empty="No model yet. Apply one with: llmgw ctl model apply -f FILE"
        rows=${unwellFirst(models, (model) => model.state === "ready" || model.state === "stopped").slice(0, SHOWN).map((model) => ({ key: model.name, cells: [
          html`<a href=${link("models", model.name)}>${model.name}</a>`, html`<${Badge} word=${model.state} />`,
          `${model.ready} of ${model.replicas_wanted}`, model.engine, model.reason] }))} />
      ${rest(models, "models")}
    <//>
    <${Section} title="Nodes">
      <${Table} caption="Nodes" columns=${["Node", "State", "Replicas", "Memory of GPUs", "Heard"]} empty="No node yet. An agent makes a machine one: llmgw agent --config FILE"
        rows=${unwellFirst(nodes, (node) => node.state === "ready").slice(0, SHOWN).map((node) => ({ key: node.id, cells: [
          html`<a href=${link("nodes")}>${node.name}</a>`, html`<${Badge} word=${nodeWord(node)} />`, String(node.replicas),
          memoryOf(node), `${duration(ageNow(node.heard_age_s))} ago`] }))} />
      ${rest(nodes, "nodes")}
    <//>
    <${Section} title="Latest events" side=${html`<a href="#/events">All events</a>`}>
      <${EventList} events=${state.events.slice(-8).reverse()} objects />
    <//>`;
}

function Tile({ label, value, note, tone = "" }) {
  return html`<div class="tile ${tone}"><div class="tile-label">${label}</div><div class="tile-value">${value}</div><div class="tile-note">${note}</div></div>`;
}

export const nodeWord = (node) => node.state !== "ready" ? node.state : node.draining ? "draining" : node.cordoned ? "cordoned" : "ready";

export function memoryOf(node) {
  const gpus = node.devices.filter((device) => device.kind === "gpu");
  if (!gpus.length) return "none";
  const sum = (field) => gpus.reduce((all, gpu) => all + (gpu[field] ?? 0), 0);
  return html`<${Bar} used=${sum("used_mib")} total=${sum("total_mib")} label=${`memory of the GPUs of ${node.name}`} />`;
}

/** With `objects`, each event names what it is about, as a link to its page where it has one. */
export function EventList({ events, objects = false }) {
  if (!events.length) return html`<p class="empty">Nothing has happened yet.</p>`;
  return html`<ol class="events">${events.map((event) => html`<li key=${event.seq} class=${event.level}>
    <${When} at=${event.at} /> <${Badge} word=${event.level} /> <span class="kind">${event.kind}${objects ? html` <${About} object=${event.object} />` : null}</span> <span class="what">${event.text}</span>
  </li>`)}</ol>`;
}

function About({ object }) {
  const at = object.indexOf("/");
  const [kind, name] = [object.slice(0, at), object.slice(at + 1)];
  if (kind === "replica" || kind === "model") return html`<a href=${link(`${kind}s`, name)}>${name}</a>`;
  return html`<span>${name || object}</span>`;
}
