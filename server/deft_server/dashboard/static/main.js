// The page: its two views, the key form, and which of them is shown.

import { ask, saveKey } from "./access.js";
import { Feed } from "./feed.js";
import { LiveView } from "./live.js";
import { Playground, exampleInstruction } from "./playground.js";

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

// The frame that is shown while there is none of a robot's.
byId("nobody-act").addEventListener("click", async () => {
  const said = byId("nobody-said");
  byId("nobody-act").disabled = true;
  said.hidden = true;
  try {
    const info = await ask("/v1/info");
    const picture = await (await fetch("/dashboard/static/example.png")).blob();
    const form = new FormData();
    form.set("image", new File([picture], "example.png", { type: "image/png" }));
    form.set("instruction", exampleInstruction(info.instructions));
    form.set("session_id", "example");
    if (!info.default_statistics_key && info.statistics_keys.length) form.set("statistics_key", info.statistics_keys[0]);
    await ask("/v1/act", { method: "POST", body: form });
  } catch (error) {
    said.textContent = error.message;
    said.hidden = false;
    if (error.status === 401 || error.status === 403) byId("key-form").hidden = false;
  } finally {
    byId("nobody-act").disabled = false;
  }
});

addEventListener("hashchange", showView);
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => live.draw());
});
showView();
feed.open();
