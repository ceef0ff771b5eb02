// The way in: a one-time link, which signs in by itself, or the admin token.
import { signIn } from "../api.js";
import { Component, html } from "../ui.js";

export class SignIn extends Component {
  constructor() {
    super();
    this.state = { token: "", busy: false, failed: "" };
    this.bind = (field) => field?.focus(); // the form may come after the page, which an autofocus would miss
  }
  async enter(event) {
    event.preventDefault();
    this.setState({ busy: true, failed: "" });
    try {
      await signIn({ token: this.state.token.trim() });
    } catch (err) {
      this.setState({ busy: false, failed: err.message, token: err.status === 401 ? "" : this.state.token });
    }
  }
  render({ why, wait }, { token, busy, failed }) {
    return html`<main class="sign-in" id="main">
      <h1><img src="icon.svg" alt="" width="32" height="32" /> llmgw</h1>
      ${wait ? html`<p role="status">${wait}</p>` : html`
        <div role="alert">${failed || why ? html`<p class=${failed ? "failed" : "note"}>${failed || why}</p>` : null}</div>
        <form onSubmit=${(e) => this.enter(e)}>
          <input type="text" autocomplete="username" value="llmgw" readonly hidden />
          <label for="token">Admin token</label>
          <input id="token" type="password" autocomplete="current-password" ref=${this.bind} value=${token} onInput=${(e) => this.setState({ token: e.target.value })} required />
          <button type="submit" class="main" disabled=${busy || !token.trim()}>Sign in</button>
        </form>
        <p class="note">It stands in the file <code>admin-token</code> of the control plane's data directory. <code>llmgw dev</code> also prints a link that signs in once.</p>`}
    </main>`;
  }
}
