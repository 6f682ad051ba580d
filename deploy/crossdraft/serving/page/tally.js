// The figures of one output: counted while it is made, then those of the server.

const PASSES = new Set(["pass", "miss"]);

export class Tally {
  #kinds = { accepted: 0, corrected: 0, bonus: 0 };
  #passes = 0;
  #first = null;
  #latest = null;
  #final = null;

  constructor(clock = () => performance.now()) {
    this.clock = clock;
    this.began = clock(); // milliseconds
  }

  /** A token arrived. */
  token(kind) {
    this.#kinds[kind] += 1;
    this.#latest = this.clock();
    this.#first ??= this.#latest;
  }

  /** Spans of the pipeline arrived. */
  spans(spans) {
    this.#passes += spans.filter(({ what }) => PASSES.has(what)).length;
  }

  /** The output is whole. */
  end(statistics) {
    this.#final = statistics;
  }

  get tokens() {
    return this.#final?.tokens ?? Object.values(this.#kinds).reduce((sum, count) => sum + count);
  }

  get tokensPerPass() {
    return this.#final?.tokens_per_pass ?? ratio(this.tokens, this.#passes);
  }

  /** Whether the drafter has drafted anything. */
  get drafted() {
    return this.#final?.draft_tokens > 0;
  }

  /** Share of the accepted among those that were judged; null if none was. */
  get acceptance() {
    const { accepted, corrected } = this.#final ?? this.#kinds;
    return ratio(accepted, accepted + corrected);
  }

  get tokensPerSecond() {
    return this.#final?.tokens_per_second ?? ratio(1000 * this.tokens, this.#latest - this.began);
  }

  /** Milliseconds from the request to the first token, as seen here. */
  get firstToken() {
    return this.#first === null ? null : this.#first - this.began;
  }
}

function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}
