// Joins the page's sliders and buttons to its two laboratories.

import { Landscape } from "./landscape.js";
import { ResidualLab } from "./residual.js";

const byId = (id) => document.getElementById(id);
const value = (id) => Number(byId(id).value);

const lab = new ResidualLab(byId("residual-plot"));
const landscape = new Landscape(byId("heat"), byId("ramp"), byId("ramp-legend"));

function read(entries) {
  for (const [id, text] of Object.entries(entries)) byId(id).textContent = text;
}

function showResidual() {
  read({ "likeness-now": value("likeness").toFixed(2), "sharpness-now": value("sharpness").toFixed(1) });
  const told = lab.draw();
  read({
    "read-mass": told.mass.toFixed(3),
    "read-accept": (1 - told.mass).toFixed(3),
    "read-drawn": String(told.drawn),
    "read-kept": told.drawn ? (told.kept / told.drawn).toFixed(3) : "–",
    "read-distance": told.drawn ? told.distance.toFixed(3) : "–",
  });
}

function reshape() {
  lab.shape(value("likeness"), value("sharpness"));
  showResidual();
}

function showLandscape() {
  const point = { alpha: value("alpha"), length: value("length"), cost: value("cost") };
  read({ "alpha-now": point.alpha.toFixed(2), "length-now": String(point.length), "cost-now": point.cost.toFixed(2) });
  const told = landscape.draw(point);
  read({
    "read-tokens": told.tokens.toFixed(2),
    "read-cost": told.cost.toFixed(2),
    "read-speedup": `${told.speedup.toFixed(2)}×`,
    "read-best": told.best ? String(told.best) : "none",
    "read-passes": told.passes.toFixed(2),
  });
}

for (const id of ["likeness", "sharpness"]) byId(id).addEventListener("input", reshape);
for (const count of [1, 100, 5000]) {
  byId(`draw-${count}`).addEventListener("click", () => {
    lab.sample(count);
    showResidual();
  });
}
byId("another").addEventListener("click", () => {
  lab.reseed();
  reshape();
});
for (const id of ["alpha", "length", "cost"]) byId(id).addEventListener("input", showLandscape);

landscape.onPick = ({ alpha, length }) => {
  byId("alpha").value = alpha;
  byId("length").value = length;
  showLandscape();
};

const redraw = () => {
  showResidual();
  showLandscape();
};
addEventListener("resize", redraw);
addEventListener("themechange", redraw);
reshape();
showLandscape();
