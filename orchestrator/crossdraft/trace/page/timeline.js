import { Lanes } from "./lanes.js";

const byId = (id) => document.getElementById(id);
const view = byId("lanes-view");
const { spans, first } = JSON.parse(byId("shown").textContent);
const lanes = new Lanes({ svg: byId("lanes"), names: byId("lane-names"), view, most: Infinity });

function zoom(how) {
  if (how === "all") lanes.fit();
  else if (how === "first") lanes.show(...first);
  else lanes.zoom(Number(how));
}

lanes.begin();
lanes.add(spans);
lanes.finish();
zoom("first");

document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
document.addEventListener("keydown", (event) => {
  const how = { "+": "2", "=": "2", "-": "0.5", "0": "all", "1": "first" }[event.key];
  if (how && !event.ctrlKey && !event.metaKey) zoom(how);
});
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  lanes.zoom(Math.exp(-event.deltaY / 300), event.clientX - view.getBoundingClientRect().left);
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
