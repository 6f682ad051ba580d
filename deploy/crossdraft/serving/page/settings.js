// The form: what can be chosen, and what is.

import { callText } from "./server.js";

const DEFAULT = ""; // value of the choice that is left to the server
const PLAIN = "none";
const INEXACT = new Set(["tokentiming"]); // methods whose output has not the target's distribution

const text = { type: "string" }, number = { type: "integer" };
const tool = (name, description, properties) =>
  ({ type: "function", function: { name, description, parameters: schema(properties) } });
const schema = (properties) => ({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
// What examples of chats ask for, beside their message.
const EXTRAS = {
  "two tools": {
    tools: [tool("weather", "The weather in a city.", { city: text }), tool("calculator", "Evaluate an arithmetic expression.", { expression: text })],
    parallel_tool_calls: false,
  },
  "a JSON schema": {
    response_format: { type: "json_schema", json_schema: { name: "person", schema: schema({ name: text, age: number, city: text }) } },
  },
};

/** Whether a request is to be made with a drafter. */
export function drafts({ speculative }) {
  return speculative.drafter !== PLAIN;
}

/** The same request without a drafter. */
export function plainly(request) {
  return { ...request, speculative: { ...request.speculative, drafter: PLAIN } };
}

/** A request's prompt or chat as it is shown. */
export function shownOf({ prompt, messages }) {
  const said = ({ content, tool_calls: calls = [] }) => content + calls.map((call) => callText(call.function)).join("");
  return prompt ?? messages.map((one) => `${one.role}: ${said(one)}\n\n`).join("") + "assistant: ";
}

export class Settings {
  #form;
  #models = [];
  #said = []; // messages of the chat so far
  #extra = ""; // what its example asks for beside its message

  constructor(form) {
    this.#form = form;
    this.#field("model").addEventListener("change", () => this.#ofModel());
    this.#field("overlap").addEventListener("change", () => this.#enable());
    this.#field("kind").addEventListener("change", () => this.#enable());
    this.#field("new-chat").addEventListener("click", () => this.#chat([]));
    for (const button of form.querySelectorAll("[data-prompt]")) {
      button.addEventListener("click", () => this.#example(button.dataset));
    }
  }

  /** Whether there is anything to choose from yet. */
  get offered() {
    return this.#models.length > 0;
  }

  /** Offers what is served. */
  offer(models) {
    this.#models = models;
    this.#options("model", models.map(({ name }) => [name, name]));
    this.#ofModel();
  }

  /** Whether all fields have values that can be sent; says what is wrong if not. */
  check() {
    this.#field("prompt").required = true;
    return this.#form.reportValidity();
  }

  get prompt() {
    return this.#field("prompt").value;
  }

  get #chatting() {
    return !this.#field("kind").hidden && this.#form.elements.kind.value === "chat";
  }

  /** Keeps what was said, so that the chat can go on. */
  answered({ messages }, answer) {
    if (!messages || !this.#chatting) return;
    this.#chat([...messages, answer]);
    this.#field("prompt").required = false; // until it is sent: an empty one is no mistake yet
    this.#field("prompt").value = "";
  }

  /** Whether the same request must give the same text, whatever the drafter. */
  get repeatable() {
    return Number(this.#field("temperature").value) === 0 || this.#field("seed").value !== "";
  }

  /** The body of a request. */
  request() {
    const value = (id) => this.#field(id).value;
    const seed = value("seed");
    return {
      model: value("model"),
      ...(this.#chatting ? { messages: [...this.#said, this.#message], ...EXTRAS[this.#extra] } : { prompt: this.prompt }),
      temperature: Number(value("temperature")),
      max_tokens: Number(value("max-tokens")),
      ...(seed !== "" && { seed: Number(seed) }),
      stream: true,
      speculative: {
        ...(value("method") !== DEFAULT && { method: value("method") }),
        ...(INEXACT.has(value("method")) && { allow_inexact: true }),
        drafter: value("drafter"),
        overlap: value("overlap"),
        ...(this.#counts && { num_speculative_tokens: Number(value("num-speculative-tokens")) }),
        trace: true,
      },
    };
  }

  /** What is said next: the result of a call, if there is one. */
  get #message() {
    const call = this.#call;
    return { ...(call ? { role: "tool", tool_call_id: call.id } : { role: "user" }), content: this.prompt };
  }

  /** The call whose result comes next. */
  get #call() {
    return this.#said.at(-1)?.tool_calls?.[0];
  }

  /** Shows which field the server refused: the last part of its name in the request. */
  refuse(name) {
    const id = name?.split(".").at(-1).replaceAll("_", "-");
    const field = id ? this.#form.querySelector(`#${CSS.escape(id)}`) : null;
    field?.setAttribute("aria-invalid", "true");
  }

  accept() {
    for (const field of this.#form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  #ofModel() {
    const model = this.#models.find(({ name }) => name === this.#field("model").value);
    if (!model) return;
    const drafters = model.drafters.map((name) => [name, name]);
    this.#options("drafter", [...drafters, [PLAIN, "none"]]);
    const methods = model.methods.map((name) => [name, INEXACT.has(name) ? `${name} (not exact)` : name]);
    this.#options("method", [[DEFAULT, "automatic"], ...methods]);
    const most = this.#field("max-tokens");
    most.max = model.context;
    most.value = Math.min(most.value, model.context);
    this.#field("kind").hidden = !model.chats;
    this.#field("detail").textContent = model.detail.join("\n");
    this.#field("detail").hidden = !model.detail.length;
    this.#enable();
  }

  /** Whether the number of draft tokens has an effect. */
  get #counts() {
    return this.#field("overlap").value !== "auto";
  }

  #enable() {
    this.#field("num-speculative-tokens").disabled = !this.#counts;
    for (const button of this.#form.querySelectorAll("[data-prompt]")) {
      button.hidden = (button.dataset.kind === "chat") !== this.#chatting;
    }
    this.#chat(this.#chatting ? this.#said : []);
  }

  #chat(messages) {
    if (!messages.length && messages !== this.#said) this.#asks("");
    this.#said = messages;
    this.#field("new-chat").hidden = !messages.length;
    const name = this.#call?.function.name;
    const label = name ? `Result of ${name}` : this.#chatting ? "Message" : "Prompt";
    this.#form.querySelector("[for=prompt]").textContent = label;
  }

  #asks(extra) {
    this.#extra = extra;
    this.#field("extra").hidden = !extra;
    this.#field("extra").textContent = `With ${extra}: ${JSON.stringify(EXTRAS[extra])}`;
  }

  #options(id, choices) {
    const field = this.#field(id), before = field.value;
    field.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
    if (choices.some(([value]) => value === before)) field.value = before;
  }

  #example({ prompt, extra = "" }) {
    if (this.#call) this.#chat([]); // which an example would answer as a result
    this.#asks(extra);
    this.#field("prompt").value = prompt;
    this.#field("prompt").focus();
  }

  #field(id) {
    return this.#form.querySelector(`#${id}`);
  }
}
