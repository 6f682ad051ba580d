// Where everything of a pipeline's picture is: bands for the lanes, and a shape for each span.

const EPOCH = 16, SERVICE = 30, WIRE = 28, SESSION = 22, GAP = 4, TOKEN = { width: 10, height: 10 }; // pixels
const STACKED = 5; // tokens on one another
const LEAST = 1.5; // pixels of a box
const DIGIT = 8; // pixels
const EPOCH_COLOURS = 6;
const SIGNS = { refused: "✕", hit: "◆", stalled: "■", lost: "!" };
const VERIFICATION = "verification", OUT = "output";

/** The bands of epochs, services, wires, session and output, from top to bottom. */
export class Bands {
  /** `services`: names of the services' lanes, such as "drafter", "target", "target 2". */
  constructor(services) {
    this.all = [];
    this.height = 0;
    this.epochs = this.#add("epoch", EPOCH);
    const ours = [...services].sort();
    const drafters = ours.filter((name) => !isTarget(name));
    drafters.forEach((name) => this.#add(name, SERVICE));
    this.above = drafters.length ? this.#add("wire", WIRE) : null;
    this.session = this.#add(VERIFICATION, SESSION);
    this.below = this.#add("wire", WIRE);
    ours.filter(isTarget).forEach((name) => this.#add(name, SERVICE));
    this.output = this.#add("tokens out", STACKED * TOKEN.height);
    this.byLane = new Map(this.all.map((band) => [band.name, band]));
    this.byLane.set(OUT, this.output);
  }

  #add(name, height) {
    const top = this.all.length ? this.height + GAP : 0;
    const band = { name, top, height, bottom: top + height, middle: top + height / 2 };
    this.all.push(band);
    this.height = band.bottom;
    return band;
  }
}

/** Whether a lane is that of a service. */
export function isService(lane) {
  return lane !== VERIFICATION && lane !== OUT;
}

function isTarget(name) {
  return name.startsWith("target");
}

// How a span of each kind is drawn.
const DRAWN = {
  draft: box("work"), branches: box("work"), scores: box("work"), pass: box("work"), miss: box("miss"), late: box("late"),
  wait: frame("wait", 0), session: frame("session", 4),
  accepted: token, corrected: token, bonus: token,
  sent: way, received: way,
  epoch: border,
  refused: sign, hit: sign, stalled: sign, lost: sign,
};

/**
 * The shapes of a span: [{ tag, attributes, text }], whose coordinates are pixels.
 * `at` turns seconds into pixels; `above` is how many tokens came at the same moment before.
 */
export function shapesOf(span, bands, at, above) {
  const place = {
    bands, band: bands.byLane.get(span.lane), from: at(span.begin), to: at(span.end), above,
    colour: `epoch${span.epoch % EPOCH_COLOURS}`,
  };
  return DRAWN[span.what]?.(span, place) ?? [];
}

function box(style) {
  return ({ count, number = String(count) }, { band, from, to, colour }) => {
    const shapes = [rectangle(band, from, to, `box ${style} ${colour}`, 0)];
    if (to - from > DIGIT * (number.length + 0.5)) {
      const attributes = { class: "number", x: (from + to) / 2, y: band.middle, dy: "0.35em" };
      shapes.push({ tag: "text", attributes, text: number });
    }
    return shapes;
  };
}

function frame(style, inset) {
  return (_, { band, from, to }) => [rectangle(band, from, to, `box ${style}`, inset)];
}

function rectangle(band, from, to, style, inset) {
  const attributes = {
    class: style, x: from, width: Math.max(LEAST, to - from), y: band.top + inset, height: band.height - 2 * inset,
  };
  return { tag: "rect", attributes };
}

function token({ what }, { band, from, above }) {
  const x = from + Math.floor(above / STACKED) * TOKEN.width, y = band.top + (above % STACKED) * TOKEN.height;
  const attributes = { class: `kind ${what}`, x, y, width: TOKEN.width - 1, height: TOKEN.height - 1 };
  return [{ tag: "rect", attributes }];
}

function way({ lane, what, label }, { bands, band, from, to, colour }) {
  const wire = isTarget(lane) ? bands.below : bands.above;
  const [own, far] = wire === bands.below ? [wire.top, band.top] : [wire.bottom, band.bottom];
  const [begin, end] = what === "sent" ? [own, far] : [far, own];
  const small = from === to || label.startsWith("go on") ? " small" : "";
  return [line(from, begin, to, end, `way ${colour}${small}`)];
}

function border({ epoch }, { bands, from, colour }) {
  const attributes = { class: `epoch ${colour}`, x: from + 3, y: bands.epochs.middle, dy: "0.35em" };
  return [line(from, 0, from, bands.height, "border"), { tag: "text", attributes, text: String(epoch) }];
}

function line(x1, y1, x2, y2, style) {
  return { tag: "line", attributes: { class: style, x1, y1, x2, y2 } };
}

function sign({ what }, { band, from }) {
  const y = { refused: band.top, hit: band.bottom }[what] ?? band.middle; // both may come at the same moment
  const attributes = { class: `sign ${what}`, x: from, y, dy: "0.35em" };
  return [{ tag: "text", attributes, text: SIGNS[what] }];
}
