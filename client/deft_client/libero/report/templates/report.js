// Shows the values of a plot's lines under the pointer. The page reads without it.
(() => {
  const hint = document.body.appendChild(document.createElement("div"));
  hint.id = "hint";
  const numbers = (text) => text.trim().split(/[\s,]+/).map(Number);
  for (const plot of document.querySelectorAll(".plot[data-x]")) {
    const [x0, x1] = numbers(plot.dataset.x), [y0, y1] = numbers(plot.dataset.y);
    const svg = plot.querySelector("svg");
    const lines = [...svg.querySelectorAll("polyline")].map((line) => {
      const flat = numbers(line.getAttribute("points"));
      return { name: line.dataset.name, xs: flat.filter((_, i) => i % 2 === 0), ys: flat.filter((_, i) => i % 2) };
    });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const across = (100 * (event.clientX - box.left)) / box.width;
      const rows = lines.filter((line) => line.xs.length).map((line) => {
        let best = 0;
        line.xs.forEach((x, i) => { if (Math.abs(x - across) < Math.abs(line.xs[best] - across)) best = i; });
        const value = y0 + ((100 - line.ys[best]) / 100) * (y1 - y0);
        return `${line.name}  ${Number(value.toPrecision(4))}`;
      });
      const place = x0 + (across / 100) * (x1 - x0);
      hint.textContent = `${plot.dataset.xname} ${Math.round(place)}\n${rows.join("\n")}`;
      hint.style.display = "block";
      const left = Math.min(event.clientX + 14, innerWidth - hint.offsetWidth - 8);
      hint.style.transform = `translate(${left}px, ${event.clientY + 14}px)`;
      hint.style.left = hint.style.top = 0;
    });
    svg.addEventListener("pointerleave", () => { hint.style.display = "none"; });
  }
})();
