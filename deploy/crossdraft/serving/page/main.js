// Brings the parts of the page together: one output at a time.

import { FiguresView, summaryOf, timesOf } from "./figures.js";
import { Key } from "./key.js";
import { Lanes } from "./lanes.js";
import { complete, models, ServerError } from "./server.js";
import { drafts, plainly, Settings, shownOf } from "./settings.js";
import { Tally } from "./tally.js";
import { TextView } from "./text.js";

const ASKED_EVERY = 2000; // milliseconds between two looks for models, while there are none

const byId = (id) => document.getElementById(id);
const form = byId("settings");
const settings = new Settings(form);
const key = new Key(byId("key-row"));
const figures = new FiguresView(byId("figures"));
const lanes = new Lanes({ svg: byId("lanes"), names: byId("lane-names"), view: byId("lanes-view") });
const output = new TextView(byId("output"));
const plainOutput = new TextView(byId("plain-output"));
let running = null; // AbortController of the output that is being made
let asking = null; // the timer of the next look for models, while there are none
let latest = null; // { tally, request, repeatable } of the last whole output with a drafter

function say(words) {
  byId("status").textContent = words;
}

function showError(error) {
  if (!(error instanceof ServerError)) throw error;
  byId("error").textContent = error.message;
  byId("error").hidden = false;
  settings.refuse(error.field);
  key.askIf(error);
}

function clearError() {
  byId("error").hidden = true;
  settings.accept();
}

function allow() {
  byId("generate").disabled = running !== null;
  byId("stop").disabled = running === null;
  byId("compare").disabled = running !== null || latest === null;
}

/** Runs one request; `show` is told of each event. Returns how it ended: { reason, statistics }, or null. */
async function run(request, show) {
  running = new AbortController();
  clearError();
  allow();
  try {
    for await (const event of complete(request, key.value, running.signal)) {
      show(event);
      if (event.end) return event.end;
    }
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else showError(error);
  } finally {
    running = null;
    allow();
  }
  return null;
}

/** Makes one output in a text's view, and says what came of it after `name`; returns its tally if it became whole. */
async function make(request, view, name, show) {
  const tally = new Tally();
  view.begin(shownOf(request));
  const end = await run(request, (event) => {
    if (event.token) {
      tally.token(event.token.kind);
      view.token(event.token, performance.now() - tally.began);
    } else if (event.spans) {
      tally.spans(event.spans);
    } else {
      tally.end(event.end.statistics);
    }
    show(event, tally);
  });
  view.end();
  if (end) say(name + summaryOf(tally, end.reason));
  tally.message = end?.message;
  return end ? tally : null;
}

async function generate() {
  if (!settings.offered) await offer();
  if (running || !settings.offered || !settings.check()) return;
  const request = settings.request(), repeatable = settings.repeatable;
  latest = null;
  byId("comparison").hidden = true;
  figures.compared(null);
  lanes.begin();
  say("Generating …");
  const tally = await make(request, output, "", (event, counted) => {
    if (event.spans) lanes.add(event.spans);
    figures.show(counted);
  });
  lanes.finish();
  latest = tally && drafts(request) ? { tally, request, repeatable } : null;
  if (tally) settings.answered(request, tally.message);
  allow();
  if (tally) await offer(); // a drafter may have gone or come meanwhile
}

async function compare() {
  const { tally, request, repeatable } = latest;
  byId("comparison").hidden = false;
  byId("verdict").textContent = "";
  say("Generating without a drafter …");
  const plain = await make(plainly(request), plainOutput, "Without a drafter: ", () => {});
  if (!plain) return;
  const times = tally.tokensPerSecond / plain.tokensPerSecond;
  const same = output.generated === plainOutput.generated;
  const texts = same ? "The texts are the same." : repeatable ? "The texts differ." : "Both are draws of the same distribution.";
  figures.compared(times);
  const drafter = tally.drafted ? "with a drafter" : "with a drafter that drafted nothing";
  byId("verdict").textContent =
    `${tally.tokensPerSecond.toFixed(0)} tokens a second ${drafter}, ` +
    `${plain.tokensPerSecond.toFixed(0)} without: ${timesOf(times)}. ${texts}`;
}

async function offer() {
  clearTimeout(asking);
  try {
    settings.offer(await models(key.value));
    clearError();
  } catch (error) {
    showError(error);
    if (!settings.offered && !error.status) asking = setTimeout(offer, ASKED_EVERY);
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("zoom-in").addEventListener("click", () => lanes.zoom(2));
byId("zoom-out").addEventListener("click", () => lanes.zoom(0.5));
byId("zoom-all").addEventListener("click", () => lanes.fit());
key.onChange(offer);
offer();
