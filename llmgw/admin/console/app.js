// The console: signs in, keeps the frame around the pages, and draws the page that the address names.
import { render } from "./vendor/preact.mjs";
import { currentSession, finishSignOut, onSession, resume, signIn, signOut } from "./api.js";
import { isStale, onChange, start, state, stop, tellLeaving } from "./live.js";
import { Freshness, StaleBanner, html } from "./ui.js";
import { Overview } from "./views/overview.js";
import { Replica, Replicas } from "./views/replicas.js";
import { Playground } from "./views/playground.js";
import { Model, Models } from "./views/models.js";
import { Nodes } from "./views/nodes.js";
import { Settings, TITLES } from "./views/settings.js";
import { Events } from "./views/events.js";
import { SignIn } from "./views/sign_in.js";

const PAGES = [["overview", "Overview"], ["models", "Models"], ["replicas", "Replicas"], ["nodes", "Nodes"], ["settings", "Settings"], ["playground", "Playground"], ["events", "Events"]];
const TICK_MS = 1_000; // ages on the page
const AGAIN_MS = 3_000; // between looks for a control plane that does not answer
const root = document.getElementById("app");
const frame = { why: "", wait: "Connecting …" };

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  try { return parts.map(decodeURIComponent); } catch { return []; } // a broken address: the first page
}

function page([name, detail]) {
  if (name === "replicas") return detail ? html`<${Replica} key=${detail} id=${detail} />` : html`<${Replicas} />`;
  if (name === "models") return detail ? html`<${Model} key=${detail} name=${detail} />` : html`<${Models} />`;
  if (name === "nodes") return html`<${Nodes} />`;
  if (name === "settings") return html`<${Settings} view=${detail in TITLES ? detail : ""} />`;
  if (name === "playground") return html`<${Playground} />`;
  if (name === "events") return html`<${Events} />`;
  return html`<${Overview} />`;
}

function App() {
  const session = currentSession();
  if (!session) return html`<${SignIn} why=${frame.why} wait=${frame.wait} />`;
  const here = route();
  const current = PAGES.some(([name]) => name === here[0]) ? here[0] : "overview";
  return html`
    <a class="skip" href="#main" onClick=${toMain}>Skip to the page</a>
    <header class="top">
      <span class="brand"><img src="icon.svg" alt="" width="24" height="24" /> llmgw</span>
      <nav aria-label="Pages"><ul>${PAGES.map(([name, title]) => html`<li key=${name}><a href=${`#/${name}`} aria-current=${name === current ? "page" : null}>${title}</a></li>`)}</ul></nav>
      <div class="top-side">
        <${Freshness} />
        <button type="button" class="quiet" onClick=${changeTheme} aria-label=${`Colours: ${theme()}. Change`} title="Colours">${{ system: "◐", light: "☀", dark: "☾" }[theme()]}</button>
        <span class="who" title=${session.role}>${session.name}</span>
        <button type="button" class="quiet" onClick=${leave}>Sign out</button>
      </div>
    </header>
    <main id="main" tabindex="-1" class=${isStale() ? "is-stale" : ""}>
      <${StaleBanner} />
      ${state.snapshot ? page(here) : html`<p class="empty" role="status">${state.problem ? `The control plane cannot be read: ${state.problem}` : "Reading the state of the cluster …"}</p>`}
    </main>`;
}

function draw() {
  const [name, detail] = route();
  const shown = name === "settings" ? TITLES[detail] : detail;
  document.title = currentSession() ? `${shown ?? PAGES.find(([one]) => one === name)?.[1] ?? "Overview"} · llmgw` : "Sign in · llmgw";
  render(html`<${App} />`, root);
}

function toMain(event) {
  event.preventDefault(); // the part after # is the page's name here
  document.getElementById("main").focus();
}

function leave() {
  tellLeaving();
  signOut();
}

// --- colours

const theme = () => document.documentElement.dataset.theme ?? "system";

function changeTheme() {
  const next = { system: "light", light: "dark", dark: "system" }[theme()];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("llmgw-theme", next); } catch { /* not kept, then */ }
  draw();
}

// --- start

onChange(draw);
onSession((session, why, wait) => {
  frame.why = why;
  frame.wait = wait;
  if (session) start();
  else stop();
  draw();
});

let shown = "";
addEventListener("hashchange", () => {
  if (takeLink()) return;
  draw();
  if (shown !== location.hash) document.getElementById("main")?.focus({ preventScroll: true });
  shown = location.hash;
  scrollTo(0, 0);
});
setInterval(() => { if (!document.hidden && currentSession()) draw(); }, TICK_MS);

/** A one-time link signs in and leaves no trace in the address or the history. True where there was one. */
function takeLink() {
  const found = /^#link=([0-9a-f]+)$/.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", `${location.pathname}${location.search}#/overview`);
  enter(found[1]);
  return true;
}

async function enter(link) {
  frame.wait = "Signing in …";
  draw();
  try {
    await signIn({ link });
  } catch (err) {
    try {
      if (!currentSession() && await resume()) return; // the link is used up, but this browser is signed in already
    } catch { /* said below */ }
    frame.wait = "";
    frame.why = err.message;
    draw();
  }
}

async function begin() {
  draw();
  if (takeLink()) return;
  if (await finishSignOut()) return;
  for (;;) {
    try {
      if (!(await resume())) { frame.wait = ""; draw(); }
      return;
    } catch {
      frame.wait = "The control plane does not answer. Trying again …";
      draw();
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
}

begin();
