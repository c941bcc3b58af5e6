// The page: its two views, the key form, and which of them is shown.

import { saveKey } from "./access.js";
import { Feed } from "./feed.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";

const byId = (id) => document.getElementById(id);
const views = ["live", "playground"];

const live = new LiveView();
const feed = new Feed({
  onUpdate: (update) => live.show(update),
  onState(state, text) {
    byId("link").dataset.state = state;
    byId("link").textContent = text;
    live.setState(state);
    byId("key-form").hidden = text !== "key needed";
  },
});
live.onWatch = (session) => feed.watch(session);
const playground = new Playground();

function showView() {
  const wanted = location.hash.slice(1);
  const current = views.includes(wanted) ? wanted : "live";
  for (const view of views) {
    byId(view).hidden = view !== current;
    if (view === current) byId(`tab-${view}`).setAttribute("aria-current", "page");
    else byId(`tab-${view}`).removeAttribute("aria-current");
  }
  if (current === "playground") playground.open();
  live.draw();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value);
  byId("key").value = "";
  feed.open();
  playground.open();
});

addEventListener("hashchange", showView);
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => live.draw());
});
showView();
feed.open();
