// Shows figures, as words and numbers for people.

const NONE = "–";

export class FiguresView {
  #fields;

  constructor(root) {
    const ids = ["tokens-per-pass", "acceptance", "tokens-per-second", "first-token", "speedup"];
    this.#fields = Object.fromEntries(ids.map((id) => [id, root.querySelector(`#${id}`)]));
  }

  show(tally) {
    this.#set("tokens-per-pass", tally.tokensPerPass, (value) => value.toFixed(2));
    this.#set("acceptance", tally.acceptance, (value) => `${Math.round(100 * value)} %`);
    this.#set("tokens-per-second", tally.tokensPerSecond, (value) => value.toFixed(value < 10 ? 1 : 0));
    this.#set("first-token", tally.firstToken, (value) => `${Math.round(value)} ms`);
  }

  /** `times` as fast as without a drafter; null: not known. */
  compared(times) {
    this.#set("speedup", times, timesOf);
  }

  #set(id, value, words) {
    this.#fields[id].textContent = value === null ? NONE : words(value);
  }
}

/** A ratio of speeds in words. */
export function timesOf(value) {
  return `${value.toFixed(2)} ×`;
}

/** One line about a whole output. */
export function summaryOf(tally, reason) {
  const parts = [
    `${tally.tokens} tokens`,
    tally.tokensPerPass && `${tally.tokensPerPass.toFixed(2)} a pass`,
    tally.tokensPerSecond && `${tally.tokensPerSecond.toFixed(0)} a second`,
    reason === "length" && "cut at the most tokens",
  ];
  return `${parts.filter(Boolean).join(", ")}.`;
}
