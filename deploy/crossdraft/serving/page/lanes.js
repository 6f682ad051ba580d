// The picture of a pipeline at work: it grows to the right while spans arrive, and can be zoomed.

import { Bands, isService, shapesOf } from "./scene.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const FIRST_SCALE = 3000, LEAST_SCALE = 1, MOST_SCALE = 100000; // pixels a second
const WIDEST = 2e6; // pixels of the whole picture
const MARGIN = 24; // pixels behind the latest span
const AXIS = 20; // pixels below the bands
const TICK_EVERY = 90; // pixels at least

export class Lanes {
  #svg;
  #names;
  #view;
  #most;
  #spans = [];
  #waiting = []; // spans that the next frame draws
  #services = new Set();
  #bands = new Bands([]);
  #scale = FIRST_SCALE;
  #fitting = true; // everything is to be seen, until the scale is changed by hand
  #end = 0; // seconds
  #ticks = 0; // drawn so far
  #stack = { at: -1, count: 0 }; // tokens of the latest moment

  /** `svg`: the picture; `names`: that of the lanes' names; `view`: what scrolls; `most`: spans that are kept. */
  constructor({ svg, names, view, most = 12000 }) {
    [this.#svg, this.#names, this.#view, this.#most] = [svg, names, view, most];
    this.#redraw();
  }

  begin() {
    [this.#spans, this.#waiting, this.#services, this.#end] = [[], [], new Set(), 0];
    [this.#scale, this.#fitting] = [FIRST_SCALE, true];
    this.#svg.setAttribute("aria-label", "Lanes over time, being drawn");
    this.#redraw();
  }

  add(spans) {
    if (!this.#waiting.length) requestAnimationFrame(() => this.#draw());
    this.#waiting.push(...spans);
  }

  /** Nothing more will come. */
  finish() {
    this.#draw();
    if (this.#fitting) this.fit();
    const passes = this.#spans.filter(({ what }) => what === "pass" || what === "miss").length;
    const refused = this.#spans.filter(({ what }) => what === "refused").length;
    const services = [...this.#services].sort().join(" and ");
    const words = `Work of ${services} over ${Math.round(this.#end * 1000)} ms: ${passes} passes, ${refused} rejections`;
    this.#svg.setAttribute("aria-label", words);
  }

  /** Shows `factor` times as much detail, and keeps what is at `pixel` from the view's left edge where it is. */
  zoom(factor, pixel = this.#view.clientWidth / 2) {
    this.#fitting = false;
    const moment = (this.#view.scrollLeft + pixel) / this.#scale;
    const most = Math.min(MOST_SCALE, WIDEST / Math.max(this.#end, 1e-3));
    this.#scale = Math.max(LEAST_SCALE, Math.min(most, this.#scale * factor));
    this.#redraw();
    this.#view.scrollLeft = moment * this.#scale - pixel;
  }

  /** Shows what is between two moments, in seconds. */
  show(begin, end) {
    this.zoom(this.#view.clientWidth / Math.max(end - begin, 1e-3) / this.#scale);
    this.#view.scrollLeft = begin * this.#scale;
  }

  /** Shows everything. */
  fit() {
    this.zoom((this.#view.clientWidth - MARGIN) / Math.max(this.#end, 1e-3) / this.#scale);
    this.#fitting = true;
  }

  #draw() {
    const spans = this.#waiting;
    this.#waiting = [];
    this.#spans.push(...spans);
    const known = this.#services.size;
    for (const { lane, end } of spans) {
      if (isService(lane)) this.#services.add(lane);
      this.#end = Math.max(this.#end, end);
    }
    const crowded = this.#spans.length > this.#most;
    if (crowded) this.#spans.splice(0, this.#most / 4);
    const follows = this.#view.scrollLeft + this.#view.clientWidth > this.#view.scrollWidth - 2 * MARGIN;
    const full = this.#fitting && this.#end * this.#scale + MARGIN > this.#view.clientWidth;
    while (full && this.#end * this.#scale + MARGIN > this.#view.clientWidth && this.#scale > LEAST_SCALE) this.#scale /= 2;
    if (full || crowded || this.#services.size > known) this.#redraw();
    else this.#extend(spans);
    if (follows) this.#view.scrollLeft = this.#view.scrollWidth;
  }

  #redraw() {
    this.#bands = new Bands(this.#services);
    this.#ticks = 0;
    this.#stack = { at: -1, count: 0 };
    const height = this.#bands.height + AXIS;
    this.#svg.setAttribute("height", height);
    this.#names.setAttribute("height", height);
    const { all } = this.#bands;
    const name = ({ name: text, middle: y }) => made("text", { x: 88, y, dy: "0.35em" }, text);
    this.#names.replaceChildren(...all.map(name), made("text", { x: 88, y: height - 5 }, "ms"));
    const band = ({ top: y, height: tall }) => made("rect", { class: "band", x: 0, width: "100%", y, height: tall });
    this.#svg.replaceChildren(...all.map(band));
    this.#extend(this.#spans);
  }

  #extend(spans) {
    this.#svg.setAttribute("width", Math.ceil(this.#end * this.#scale) + MARGIN);
    const parts = document.createDocumentFragment();
    parts.append(...this.#newTicks());
    const at = (seconds) => Math.round(seconds * this.#scale * 100) / 100;
    for (const span of spans) {
      for (const { tag, attributes, text } of shapesOf(span, this.#bands, at, this.#above(span))) {
        const shape = made(tag, attributes, text);
        shape.append(made("title", {}, hintOf(span)));
        parts.append(shape);
      }
    }
    this.#svg.append(parts);
  }

  /** How many tokens of the same moment were drawn before this one. */
  #above({ lane, begin }) {
    if (lane !== "output") return 0;
    if (begin !== this.#stack.at) this.#stack = { at: begin, count: 0 };
    return this.#stack.count++;
  }

  *#newTicks() {
    const step = tickStep(this.#scale), y = this.#bands.height + AXIS - 5;
    for (; this.#ticks * step <= this.#end; this.#ticks++) {
      const text = Number((this.#ticks * step * 1000).toPrecision(8)).toLocaleString("en");
      yield made("text", { class: "tick", x: this.#ticks * step * this.#scale, y }, text);
    }
  }
}

function hintOf({ lane, label, what, epoch, begin, end }) {
  const words = lane === "output" ? `${JSON.stringify(label)}, ${what}` : `${lane}: ${label}`;
  const from = (begin * 1000).toFixed(1), took = ((end - begin) * 1000).toFixed(1);
  return `${words}, epoch ${epoch}, at ${from} ms${end > begin ? ` for ${took} ms` : ""}`;
}

/** Seconds between numbers of the axis: round ones, not too close. */
function tickStep(scale) {
  for (let power = 1e-5; ; power *= 10) {
    for (const one of [1, 2, 5]) if (one * power * scale >= TICK_EVERY) return one * power;
  }
}

function made(tag, attributes, text) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
