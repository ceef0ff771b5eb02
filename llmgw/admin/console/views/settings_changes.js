// What differs between two documents, key by key, as people compare it.
import { Badge, Table, html } from "../ui.js";
import { inline, isTables, same } from "../settings_document.js";
import { defaultOf } from "../settings.js";

const SHORT = 60; // characters that stand well in a column

/** Rows of { path, before, after, applies }; null: not set there, so that its default holds. `both`: paths that others changed too. */
export function Changes({ changes, caption, empty = "Nothing differs.", both = [] }) {
  return html`<${Table} caption=${caption} columns=${["Key", "Before", "After", "Takes effect"]} empty=${empty}
    rows=${changes.map((change) => ({ key: change.path, cells: [
      html`<span><code>${change.path}</code>${both.includes(change.path) ? html`<br /><span class="clash">changed by others too: yours would take its place</span>` : null}</span>`,
      html`<${Side} path=${change.path} value=${change.before} other=${change.after} />`,
      html`<${Side} path=${change.path} value=${change.after} other=${change.before} />`,
      change.applies === "restart" ? html`<${Badge} word="restart" />` : "at once"] }))} />`;
}

/** One side. Of a list of tables only those that the other side has not. */
function Side({ path, value, other }) {
  if (value === null || value === undefined) {
    const usual = defaultOf(path);
    return html`<span class="note">default${usual === null || same(usual, []) || usual === "" ? "" : html`: <code>${inline(usual)}</code>`}</span>`;
  }
  if (isTables(value)) {
    const there = (Array.isArray(other) ? other : []).map(inline);
    const own = value.filter((one) => !there.includes(inline(one)));
    const alike = value.length - own.length;
    return html`<div>${own.map((one, index) => html`<pre class="value" key=${index}>${Object.entries(one).map(([name, part]) => `${name} = ${inline(part)}`).join("\n")}</pre>`)}
      ${alike ? html`<span class="note">${own.length ? `and ${alike} that ${alike === 1 ? "stays" : "stay"} as ${alike === 1 ? "it is" : "they are"}` : `the same ${alike}, or in another order`}</span>` : null}</div>`;
  }
  const text = inline(value);
  return text.length > SHORT ? html`<pre class="value">${Array.isArray(value) ? value.map(inline).join("\n") : text}</pre>` : html`<code>${text}</code>`;
}
