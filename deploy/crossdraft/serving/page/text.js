// A text as it is made: its prompt, then one element for each token. The texts of models are never read as HTML.

export class TextView {
  #element;

  constructor(element) {
    this.#element = element;
  }

  /** Begins with a prompt. Screen readers are told of the text when it is whole. */
  begin(prompt) {
    this.#element.replaceChildren(span("prompt", prompt));
    this.#element.setAttribute("aria-busy", "true");
  }

  token({ text, kind }, milliseconds) {
    if (text === "") return; // not yet a whole character, or a control symbol
    const element = span(`token ${kind}`, text);
    element.title = `${kind}, after ${Math.round(milliseconds)} ms`;
    const follows = atEnd(this.#element);
    this.#element.append(element);
    if (follows) this.#element.scrollTop = this.#element.scrollHeight;
  }

  end() {
    this.#element.setAttribute("aria-busy", "false");
  }

  /** What was generated, without the prompt. */
  get generated() {
    return [...this.#element.querySelectorAll(".token")].map((token) => token.textContent).join("");
  }
}

function span(style, text) {
  const element = document.createElement("span");
  element.className = style;
  element.textContent = text;
  return element;
}

function atEnd(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 4;
}
