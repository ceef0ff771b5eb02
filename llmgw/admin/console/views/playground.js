// A chat with a model, as a client of the public API sees it: the answer appears token by token, and Stop ends it in the engine.
import { state } from "../live.js";
import { ask, onSession } from "../api.js";
import { Component, Section, createRef, html } from "../ui.js";

// Kept while the page is open and somebody is signed in, so that a look at another screen does not lose the talk. Prompts are stored nowhere.
const untold = () => ({ model: "", system: "", limit: "512", heat: "", key: "", draft: "", turns: [] });
const talk = untold();
onSession((session) => { if (!session) Object.assign(talk, untold()); });

export class Playground extends Component {
  constructor() {
    super();
    this.state = { busy: false, told: "" };
    this.atEnd = true;
    this.bind = (pane) => { this.pane = pane; };
    this.draft = createRef();
    this.button = createRef();
  }
  componentWillUnmount() { this.gone = true; this.abort?.abort(); }
  componentDidMount() { this.componentDidUpdate(); }
  componentDidUpdate() { if (this.atEnd && this.pane) this.pane.scrollTop = this.pane.scrollHeight; }

  set(field, value) {
    talk[field] = value;
    this.forceUpdate();
  }

  async send() {
    const words = talk.draft.trim();
    const model = chosen();
    if (!words || !model || this.state.busy) return;
    const messages = [];
    if (talk.system.trim()) messages.push({ role: "system", content: talk.system });
    for (const turn of talk.turns) if (!turn.failed && turn.content) messages.push({ role: turn.role, content: turn.content });
    messages.push({ role: "user", content: words });
    const answer = { role: "assistant", model, content: "", thought: "", note: "", failed: "" };
    talk.turns.push({ role: "user", content: words }, answer);
    talk.draft = "";
    this.atEnd = true;
    this.abort = new AbortController();
    this.setState({ busy: true, told: `${model} is answering` });
    const body = { model, messages, stream: true };
    if (Number(talk.limit) > 0) body.max_tokens = Math.floor(Number(talk.limit));
    if (talk.heat !== "" && Number.isFinite(Number(talk.heat))) body.temperature = Number(talk.heat);
    const began = performance.now();
    let first = 0;
    let pieces = 0;
    try {
      const response = await ask("chat/completions", body, talk.key, this.abort.signal);
      if (!response.ok) throw new Error(await whyNot(response));
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(String(event.error.message ?? "the answer ended with an error"));
        const delta = event.choices?.[0]?.delta ?? {};
        const thought = delta.reasoning_content ?? delta.reasoning;
        if (typeof thought === "string") answer.thought += thought;
        if (typeof delta.content === "string") answer.content += delta.content;
        if (typeof thought === "string" || typeof delta.content === "string") {
          first ||= performance.now();
          pieces += 1;
        }
        if (event.choices?.[0]?.finish_reason === "length") answer.cut = true;
        if (!this.gone) this.forceUpdate();
      }
      answer.note = numbers(began, first, pieces) + (answer.cut ? ", ended at the limit of tokens" : "");
      this.done("The answer is complete");
    } catch (err) {
      if (this.abort.signal.aborted) {
        answer.note = `stopped${pieces ? `, ${numbers(began, first, pieces)}` : ""}`;
        this.done("Stopped");
      } else {
        answer.failed = err instanceof SyntaxError ? "the answer held something that is no JSON" : err instanceof TypeError ? "the connection was lost" : err.message;
        this.done(`It failed: ${answer.failed}`);
      }
    }
  }

  done(told) {
    if (this.gone) return;
    const had = this.button.current === document.activeElement;
    this.setState({ busy: false, told }, () => { if (had) this.draft.current?.focus(); }); // Stop has become Send, with nothing to send
  }

  renew() {
    talk.turns = [];
    this.setState({ told: "" }, () => this.draft.current?.focus());
  }

  pressed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  render(_, { busy, told }) {
    const models = offered();
    const model = chosen();
    const known = models.find((one) => one.name === model);
    return html`
      <h1>Playground</h1>
      <div class="chat">
        <${Section} title="Chat" side=${html`<button type="button" disabled=${busy || !talk.turns.length} onClick=${() => this.renew()}>New chat</button>`}>
          <div class="turns" tabindex="0" role="log" aria-live="off" aria-label="Messages" ref=${this.bind}
            onScroll=${() => { if (this.pane) this.atEnd = this.pane.scrollHeight - this.pane.scrollTop - this.pane.clientHeight < 8; }}>
            ${talk.turns.length ? talk.turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} busy=${busy && index === talk.turns.length - 1} />`)
              : html`<p class="empty">${models.length ? "Say something to the model. It answers here, token by token." : "There is no model to talk to yet."}</p>`}
          </div>
          <form class="compose" onSubmit=${(e) => { e.preventDefault(); this.send(); }}>
            <label class="hidden" for="draft">Your message</label>
            <textarea id="draft" ref=${this.draft} rows="3" placeholder="Your message (Enter sends, Shift+Enter begins a new line)" value=${talk.draft}
              onInput=${(e) => this.set("draft", e.target.value)} onKeyDown=${(e) => this.pressed(e)}></textarea>
            ${busy ? html`<button type="button" class="danger" ref=${this.button} onClick=${() => this.abort.abort()}>Stop</button>`
              : html`<button type="submit" class="main" ref=${this.button} disabled=${!talk.draft.trim() || !model}>Send</button>`}
          </form>
          <p class="hidden" role="status">${told}</p>
        <//>
        <${Section} title="Settings">
          <form class="fields" onSubmit=${(e) => e.preventDefault()}>
            <input type="text" autocomplete="username" value="playground" readonly hidden />
            <label>Model <select id="model" value=${model} onChange=${(e) => this.set("model", e.target.value)}>
              ${models.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}${one.ready ? "" : ` (${one.state})`}</option>`)}</select></label>
            ${known && !known.ready ? html`<p class="note">${known.reason || `It is ${known.state}.`} A request to it waits or is refused.</p>` : null}
            <label>At most, in tokens <input type="number" min="1" step="1" value=${talk.limit} onInput=${(e) => this.set("limit", e.target.value)} /></label>
            <label>Temperature <input type="number" min="0" max="2" step="0.1" placeholder="the engine's own" value=${talk.heat} onInput=${(e) => this.set("heat", e.target.value)} /></label>
            <label>System prompt <textarea rows="3" value=${talk.system} onInput=${(e) => this.set("system", e.target.value)}></textarea></label>
            <label>API key <input type="password" autocomplete="off" placeholder="only where keys are required" value=${talk.key} onInput=${(e) => this.set("key", e.target.value)} /></label>
          </form>
        <//>
      </div>`;
  }
}

function Turn({ turn, busy }) {
  return html`<article class="turn ${turn.role}">
    <h3>${turn.role === "user" ? "You" : turn.model}</h3>
    ${turn.thought ? html`<p class="thought">${turn.thought}</p>` : null}
    <p class="said">${turn.content}${busy ? html`<span class="caret" aria-hidden="true"></span>` : null}</p>
    ${turn.failed ? html`<p class="failed" role="alert">${turn.failed}</p>` : null}
    ${turn.note ? html`<p class="note">${turn.note}</p>` : null}
  </article>`;
}

const offered = () => state.snapshot.models.filter((model) => model.kind === "chat");
function chosen() {
  const models = offered();
  if (models.some((model) => model.name === talk.model)) return talk.model;
  return (models.find((model) => model.ready) ?? models[0])?.name ?? "";
}

function numbers(began, first, pieces) {
  if (!pieces) return "no text came back";
  const after = (performance.now() - first) / 1000;
  const rate = pieces > 1 && after > 0 ? `, ${((pieces - 1) / after).toFixed(1)} pieces/s` : "";
  return `first token after ${Math.round(first - began)} ms${rate}`;
}

async function whyNot(response) {
  let body = null;
  try { body = await response.json(); } catch { /* said below */ }
  const why = body?.error?.message ?? `the router answered with status ${response.status}`;
  return response.status === 401 && body?.error?.code !== "session_ended" ? `${why} (an API key goes into the settings)` : why;
}

/** The data of each server-sent event of a response, as they come. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? "\n\n" : value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(line[5] === " " ? 6 : 5));
        if (data.length) yield data.join("\n");
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
