// A control for each type of key. Whoever types sees what was typed; what it means is handed on at once, and the server judges it.
import { Component, html } from "../ui.js";
import { same } from "../settings_document.js";

const NUMBER = /^[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$/i;
const isList = (key) => key.type.startsWith("list of ");

/** What a typed text stands for: a number where it is one, else the text, so that the server says what is wrong with it. */
function meant(key, typed) {
  const number = (text) => NUMBER.test(text.trim()) ? Number(text) : text;
  if (key.type === "list of numbers") return typed.split("\n").filter((line) => line.trim()).map(number);
  if (isList(key)) return typed.split("\n").filter((line) => line !== "");
  if (key.type === "number" || key.type === "whole number") return number(typed);
  return typed;
}

const asTyped = (key, value) => value === null || value === undefined ? "" : Array.isArray(value) ? value.join("\n") : String(value);

/** Why a value cannot be right, as far as the schema tells; "" where it may be. */
export function plainFault(key, value) {
  if (key.type !== "number" && key.type !== "whole number") return "";
  if (typeof value !== "number") return value === "" || value === null ? `a ${key.type} is missing` : `expected a ${key.type}`;
  if (key.type === "whole number" && !Number.isInteger(value)) return "expected a whole number";
  if (key.low !== null && value < key.low) return `must be at least ${key.low}`;
  if (key.high !== null && value > key.high) return `must be at most ${key.high}`;
  return "";
}

/** `id` of the control, `name` for readers where no label stands beside it; `change(value)`. */
export class Control extends Component {
  constructor() {
    super();
    this.state = { typed: null };
  }
  type(typed) {
    this.setState({ typed });
    this.props.change(meant(this.props.field, typed));
  }
  render({ id, field, value, disabled, name, describedby, invalid, change }, { typed }) {
    const aria = { "aria-label": name ?? null, "aria-describedby": describedby ?? null, "aria-invalid": invalid ? "true" : null };
    if (field.type === "true or false") return html`<select id=${id} ...${aria} disabled=${disabled} value=${String(value)} onChange=${(e) => change(e.target.value === "true")}><option>true</option><option>false</option></select>`;
    if (field.choices?.length) {
      const choices = field.choices.includes(value) || value === null || value === undefined ? field.choices : [value, ...field.choices];
      return html`<select id=${id} ...${aria} disabled=${disabled} value=${String(value ?? "")} onChange=${(e) => change(e.target.value)}>${choices.map((one) => html`<option key=${one}>${one}</option>`)}</select>`;
    }
    if (field.type === "table of strings") return html`<${Pairs} id=${id} aria=${aria} value=${value ?? {}} disabled=${disabled} change=${change} name=${name ?? field.path} />`;
    if (isList(field) && Array.isArray(value) && value.some((one) => typeof one === "string" && /[\r\n]/.test(one)))
      return html`<p id=${id} tabindex="-1" class="note">It holds a line break: change it in the view TOML.</p>`;
    // What was typed stands as long as it means what is set; the value may have been changed elsewhere.
    const text = typed !== null && same(meant(field, typed), value) ? typed : asTyped(field, value);
    if (isList(field)) return html`<textarea id=${id} ...${aria} disabled=${disabled} rows=${Math.min(8, Math.max(2, text.split("\n").length))} value=${text} spellcheck=${false} placeholder="one on each line" onInput=${(e) => this.type(e.target.value)}></textarea>`;
    const isNumber = field.type === "number" || field.type === "whole number";
    return html`<input id=${id} ...${aria} type="text" class=${isNumber ? "number" : ""} inputmode=${isNumber ? "decimal" : null} disabled=${disabled} value=${text} spellcheck=${false} autocomplete="off" onInput=${(e) => this.type(e.target.value)} />`;
  }
}

/** A table of texts: a row for each name. */
function Pairs({ id, aria, value, disabled, change, name }) {
  const rows = Object.entries(value);
  const put = (index, row) => change(Object.fromEntries(rows.map((one, at) => at === index ? row : one)));
  return html`<div class="pairs" id=${id} tabindex="-1" role="group" ...${aria}>
    ${rows.map(([key, text], index) => html`<span class="pair" key=${index}>
      <input type="text" aria-label=${`${name}: name ${index + 1}`} disabled=${disabled} value=${key} onChange=${(e) => put(index, [e.target.value, text])} />
      <input type="text" aria-label=${`${name}: value of ${key}`} disabled=${disabled} value=${text} onInput=${(e) => put(index, [key, e.target.value])} />
      <button type="button" disabled=${disabled} aria-label=${`Remove ${key} of ${name}`} onClick=${() => change(Object.fromEntries(rows.filter((_, at) => at !== index)))}>Remove</button></span>`)}
    <button type="button" disabled=${disabled || Object.hasOwn(value, "")} onClick=${() => change({ ...value, "": "" })}>Add</button>
  </div>`;
}
