// How far a version has come: what each control plane makes of it, who may restart now, and the pause that stops it.
import { mayOrder } from "../api.js";
import { Badge, Component, Order, Section, Table, When, counted, duration, html } from "../ui.js";
import { desk, inFile, refresh, whyReadOnly } from "../settings.js";

const SILENT_S = 3; // a standby speaks every second
const RESTS = ["idle", "frozen"];

/** A word and a sentence for the whole cluster. */
export function standing() {
  const { control_planes: planes, desired, rollout, pause, version } = desk.newest;
  const withIt = planes.filter((plane) => plane.applied === desired).length;
  const everywhere = `${withIt} of ${counted(planes.length, "control plane")} ${planes.length === 1 ? "runs" : "run"} version ${desired}`;
  if (rollout.phase === "frozen") return { word: "frozen", told: rollout.reason || rollout.waiting };
  if (pause) return { word: "paused", told: `${pause.reason || "no reason was given"}${pause.author ? ` (${pause.author})` : ""}` };
  if (rollout.phase !== "idle") return { word: "rolling_out", told: rollout.waiting || everywhere };
  if (desk.newest.held) return { word: "held", told: `version ${version} is held: ${desk.newest.why_held}` };
  const refusing = planes.filter((plane) => plane.refused >= desired && plane.refused);
  if (refusing.length) return { word: "refused", told: refusing.map((plane) => `${plane.name}: ${plane.why}`).join("; ") };
  if (withIt < planes.length) return { word: "rolling_out", told: rollout.waiting || everywhere };
  return { word: "in_force", told: everywhere };
}

/** [word, why] of one control plane. */
function stateOf(plane) {
  const { desired, rollout, pause } = desk.newest;
  if (plane.refused && plane.refused >= desired) return ["refused", `version ${plane.refused} is not taken here: ${plane.why}`];
  if (plane.address === rollout.token && !RESTS.includes(rollout.phase) && plane.applied !== desired) return ["restarting", `it may restart now, for version ${rollout.version}`];
  if (plane.heard_s !== null && plane.heard_s > SILENT_S) return ["lost", `not heard for ${duration(plane.heard_s)}`];
  const waits = pause ? "it waits until the pause is over" : rollout.phase === "frozen" ? "the roll-out has stopped" : "it waits until it is its turn to restart";
  if (plane.pending) return ["waiting", `version ${plane.pending} loads here; ${waits}`];
  if (plane.restart_for_file) return ["waiting", `its own file has changed; ${waits}`];
  if (plane.applied === desired) return ["in_force", ""];
  return ["pending", plane.live ? `live keys of version ${plane.live}` : "it has not told yet"];
}

export function Rollout() {
  const { control_planes: planes, rollout } = desk.newest;
  if (inFile()) return html`<section class="panel"><p class="empty">${whyReadOnly()}</p></section>`;
  return html`
    <${Section} title="Control planes">
      ${rollout.waiting || rollout.reason ? html`<p class="why">${rollout.waiting || rollout.reason}</p>` : null}
      <${Table} caption="What each control plane makes of the settings" columns=${["Control plane", "State", "Live keys", "Whole version", "Waits with", "Heard", "Why"]} empty="None is known."
        rows=${planes.map((plane) => {
          const [word, why] = stateOf(plane);
          const roles = [plane.leads ? "leads" : "stands by", ...(plane.me ? ["serves this page"] : [])].join(", ");
          return { key: plane.address, cells: [html`<span>${plane.name} <span class="note">${roles}<br />${plane.address}</span></span>`, html`<${Badge} word=${word} />`,
            plane.live ? `version ${plane.live}` : "none", plane.applied ? `version ${plane.applied}` : "none", plane.pending ? `version ${plane.pending}` : "",
            plane.me ? "" : plane.heard_s === null ? "by the leader" : `${duration(plane.heard_s)} ago`, why] };
        })} />
      <p class="note">Live keys are in force within a second. A key that takes a restart waits until this control plane's turn: standbys first, one at a time, the leader last.</p>
    <//>
    <${PausePanel} />`;
}

class PausePanel extends Component {
  constructor() {
    super();
    this.state = { reason: "" };
  }
  render(_, { reason }) {
    const { pause } = desk.newest;
    const why = mayOrder() ? "" : whyReadOnly();
    const after = () => { this.setState({ reason: "" }); refresh(); };
    return html`<${Section} title="Pause">
      ${pause ? html`<p class="why"><${Badge} word="paused" /> since <${When} at=${pause.since} />${pause.author ? ` by ${pause.author}` : ""}${pause.reason ? `: ${pause.reason}` : ""}</p>`
        : html`<p>Roll-outs, moves and scaling go on. A pause stops them; requests are served and crashed replicas restarted all the same.</p>`}
      ${why ? html`<p class="orders"><button type="button" disabled title=${why}>${pause ? "Resume" : "Pause"}</button> <span class="note">${why}</span></p>`
        : pause ? html`<${Order} key="resume" label="Resume" method="DELETE" to="pause" after=${after} />`
        : html`<div class="controls pause"><label>Reason <input type="text" maxlength="1000" value=${reason} onInput=${(e) => this.setState({ reason: e.target.value })} /></label>
          <${Order} key="pause" label="Pause" to="pause" body=${{ reason: reason.trim() }} sure="Nothing rolls out, moves or scales until somebody resumes." after=${after} /></div>`}
    <//>`;
  }
}
