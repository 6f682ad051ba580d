// Zoom, pan and hints. The drawing itself is in the page: without this script it is still there.
const scene = document.getElementById("scene");
const view = scene.parentElement;
const hint = document.getElementById("hint");
const ticks = document.getElementById("ticks");
const end = Number(scene.dataset.end);
const height = Number(scene.dataset.height);
const LEAST = 1.5, TICK_EVERY = 90;
const shapes = [...scene.querySelectorAll("[data-t]")].map((element) => {
  const [begin, finish] = element.dataset.t.split(" ").map(Number);
  return { element, begin, finish, wide: Number(element.dataset.w), need: Number(element.dataset.need) };
});
let scale = FIRST_SCALE;

function place({ element, begin, finish, wide, need }) {
  const from = begin * scale, to = finish * scale;
  if (element.tagName === "line") {
    element.setAttribute("x1", from);
    element.setAttribute("x2", to);
  } else if (element.tagName === "rect" && wide) {
    element.setAttribute("x", from - wide / 2);
  } else if (element.tagName === "rect") {
    element.setAttribute("x", from);
    element.setAttribute("width", Math.max(LEAST, to - from));
  } else if (need) {
    element.setAttribute("x", (from + to) / 2);
    element.toggleAttribute("display", false);
    if (to - from <= need) element.setAttribute("display", "none");
  } else {
    element.setAttribute("x", from);
  }
}

function tickStep() {
  for (let power = 1e-5; ; power *= 10) {
    for (const one of [1, 2, 5]) if (one * power * scale >= TICK_EVERY) return one * power;
  }
}

function drawTicks() {
  const step = tickStep();
  const parts = [];
  for (let number = 0; number * step <= end; number++) {
    const x = number * step * scale;
    const text = Number((number * step * 1000).toPrecision(10)).toLocaleString("en");
    parts.push(`<g><line x1="${x}" x2="${x}" y1="0" y2="${height + 5}"/><text x="${x}" y="${height + 18}">${text}</text></g>`);
  }
  ticks.innerHTML = parts.join("");
}

// Keeps the moment under `pixel` (from the left edge of the view) where it is.
function zoomTo(wanted, pixel) {
  const moment = (view.scrollLeft + pixel) / scale;
  const fits = view.clientWidth / end;
  scale = Math.min(Math.max(wanted, Math.min(fits, FIRST_SCALE)), 2e6 / end, 2e6);
  scene.setAttribute("width", Math.ceil(end * scale));
  shapes.forEach(place);
  drawTicks();
  view.scrollLeft = moment * scale - pixel;
}

function zoom(how) {
  if (how === "all") {
    zoomTo(view.clientWidth / end, 0);
  } else if (how === "first") {
    zoomTo(FIRST_SCALE, 0);
    view.scrollLeft = FIRST_BEGIN * scale;
  } else {
    zoomTo(scale * Number(how), view.clientWidth / 2);
  }
}

document.querySelector(".tools").hidden = false;
document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
document.addEventListener("keydown", (event) => {
  const how = { "+": "2", "=": "2", "-": "0.5", "0": "all", "1": "first" }[event.key];
  if (how && !event.ctrlKey && !event.metaKey) zoom(how);
});
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomTo(scale * Math.exp(-event.deltaY / 300), event.clientX - view.getBoundingClientRect().left);
}, { passive: false });

let held = null;
view.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.pointerType === "touch") return;
  held = { x: event.clientX, left: view.scrollLeft };
  view.classList.add("held");
});
addEventListener("pointermove", (event) => {
  if (held) view.scrollLeft = held.left + held.x - event.clientX;
});
addEventListener("pointerup", () => {
  held = null;
  view.classList.remove("held");
});

// The titles become hints that are shown at once.
scene.querySelectorAll("title").forEach((title) => {
  title.parentElement.dataset.hint = title.textContent;
  title.remove();
});
scene.addEventListener("pointermove", (event) => {
  const text = event.target.dataset ? event.target.dataset.hint : "";
  hint.hidden = !text || Boolean(held);
  if (hint.hidden) return;
  hint.textContent = text;
  hint.style.left = `${Math.min(event.clientX + 14, innerWidth - hint.offsetWidth - 8)}px`;
  hint.style.top = `${event.clientY + 16}px`;
});
scene.addEventListener("pointerleave", () => { hint.hidden = true; });
zoom("first");
