// Every model: wanted and ready. One model: how many of it, which engine, and why it has the replicas it has.
import { state } from "../live.js";
import { mayOrder, read } from "../api.js";
import { Badge, Component, Order, Section, Table, createRef, html, link, path } from "../ui.js";
import { Rejections } from "./replicas.js";

export function Models() {
  const { models } = state.snapshot;
  return html`
    <h1>Models</h1>
    <${Section} title="What clients may name">
      <${Table} caption="Models" columns=${["Model", "State", "Ready", "Engine", "Also called", "Why"]} empty="No model yet. Apply one with: llmgw ctl model apply -f FILE"
        rows=${models.map((model) => ({ key: model.name, cells: [
          html`<a href=${link("models", model.name)}>${model.name}</a>`, html`<${Badge} word=${model.state} />`, `${model.ready} of ${model.replicas_wanted}`,
          `${model.engine}${model.profile === model.engine ? "" : ` (${model.profile})`}`, model.aliases.join(", "), model.reason] }))} />
    <//>`;
}

export class Model extends Component {
  constructor() {
    super();
    this.state = { detail: null, why: null, problem: "", count: null };
    this.seen = "";
    this.scale = createRef();
  }
  componentDidMount() { this.load(); }
  componentDidUpdate() { this.load(); }
  componentWillUnmount() { this.gone = true; }

  async load() {
    const model = state.snapshot.models.find((one) => one.name === this.props.name);
    const seen = `${model?.revision} ${model?.state} ${model?.ready} ${model?.profile} ${model?.reason}`;
    if (seen === this.seen) return;
    this.seen = seen;
    const [detail, why] = await Promise.allSettled([read(`models/${encodeURIComponent(this.props.name)}`), read(`explain/model/${encodeURIComponent(this.props.name)}`)]);
    if (this.gone) return;
    this.setState({
      detail: detail.status === "fulfilled" ? detail.value : null,
      why: why.status === "fulfilled" ? why.value : null,
      problem: detail.status === "rejected" ? detail.reason.message : "",
    });
  }

  render({ name }, { detail, why, problem, count }) {
    const model = state.snapshot.models.find((one) => one.name === name);
    const replicas = state.snapshot.replicas.filter((one) => one.model === name);
    const wanted = count ?? model?.replicas_wanted ?? 0;
    const profiles = detail?.model?.profile ?? [];
    return html`
      <nav class="crumbs" aria-label="Where you are"><a href="#/models">Models</a> <span aria-hidden="true">/</span> <span>${name}</span></nav>
      <h1>${name}</h1>
      ${model ? html`<${Section} title="Now" side=${html`<${Order} label="Restart" to=${`models/${path(name)}/restart`} body=${{}} sure="Replicas are replaced one at a time." />`}>
        <dl class="facts">
          <div><dt>State</dt><dd><${Badge} word=${model.state} /></dd></div><div><dt>Ready</dt><dd>${model.ready} of ${model.replicas_wanted}</dd></div>
          <div><dt>Kind</dt><dd>${model.kind}</dd></div><div><dt>Also called</dt><dd>${model.aliases.join(", ") || "nothing else"}</dd></div>
          <div><dt>Revision</dt><dd>${model.revision}</dd></div>
        </dl>
        ${model.reason ? html`<p class="why">${model.reason}</p>` : null}
        ${mayOrder() ? html`<form class="controls" noValidate onSubmit=${(e) => { e.preventDefault(); this.scale.current?.press(); }}>
          <label>Replicas <input type="number" min=${model.replicas_min} max=${model.replicas_max} value=${String(wanted)} onInput=${(e) => this.setState({ count: e.target.value })} /></label>
          <${Order} handle=${this.scale} label="Scale" to=${`models/${path(name)}/scale`} body=${{ count: Number(wanted) }} disabled=${count === null || !Number.isInteger(Number(count)) || count === ""} after=${() => this.setState({ count: null })} />
          <span class="note">${model.replicas_min} to ${model.replicas_max}</span>
        </form>` : null}
      <//>` : html`<p class="empty" role="status">There is no model of this name.</p>`}
      ${model ? html`<${Section} title="Engines it may run on">
        <${Table} caption="Profiles" columns=${["Profile", "Engine", "Checkpoint", "GPUs", "Runs", ""]} empty=${problem || "Reading …"}
          rows=${profiles.map((one) => ({ key: one.name, cells: [one.name, one.engine, one.checkpoint ?? "", one.gpus ?? "", one.name === model.profile ? "yes" : "",
            one.name === model.profile ? "" : html`<${Order} label="Run" name=${`Run profile ${one.name}`} to=${`models/${path(name)}/engine`} body=${{ profile: one.name }} sure="Replicas move to this profile." />`] }))} />
      <//>` : null}
      ${model || replicas.length ? html`<${Section} title="Why it has these replicas">
        ${why ? html`<p class="why">${why.text}</p>${why.rejections.length ? html`<${Rejections} rows=${why.rejections} />` : null}` : html`<p class="empty">Nothing is known.</p>`}
        <${Table} caption="Replicas of this model" columns=${["Replica", "State", "Node"]} empty="It has no replica now."
          rows=${replicas.map((one) => ({ key: one.id, cells: [html`<a href=${link("replicas", one.id)}>${one.id}</a>`, html`<${Badge} word=${one.state} />`, one.node] }))} />
      <//>` : null}`;
  }
}
