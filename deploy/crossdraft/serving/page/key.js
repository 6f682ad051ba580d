// The API key: asked for when the server wants one, kept until the tab is closed.

const NAME = "crossdraft-key";
const UNAUTHORIZED = 401;

export class Key {
  #row;
  #field;

  constructor(row) {
    this.#row = row;
    this.#field = row.querySelector("input");
    this.#field.value = sessionStorage.getItem(NAME) ?? "";
    row.hidden = this.#field.value === "";
    this.#field.addEventListener("change", () => sessionStorage.setItem(NAME, this.#field.value));
  }

  get value() {
    return this.#field.value;
  }

  /** Calls back when another key was entered. */
  onChange(listener) {
    this.#field.addEventListener("change", listener);
  }

  /** Asks for a key if it is the lack of one that failed. */
  askIf(error) {
    if (error.status !== UNAUTHORIZED) return;
    this.#row.hidden = false;
    this.#field.focus();
  }
}
