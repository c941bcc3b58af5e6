// Plays the videos of a trial together, and shows the values of a plot's lines under the pointer.
// The page reads without it.
(() => {
  const races = [...document.querySelectorAll(".race")];
  const button = document.getElementById("play"), choice = document.getElementById("race");
  if (!races.length) return;
  const shown = () => races.find((race) => !race.hidden);
  const videos = () => [...shown().querySelectorAll("video")];
  const isPlaying = () => videos().some((video) => !video.paused && !video.ended);
  const tell = (video) => {
    const now = Math.min(video.currentTime / video.dataset.rate, video.dataset.seconds);
    const clock = video.closest("figure").querySelector(".clock");
    const isRunning = video.currentTime > 0 && now < video.dataset.seconds;
    clock.textContent = isRunning ? `${now.toFixed(1)} s` : clock.dataset.told;
  };
  const label = () => {
    button.textContent = isPlaying() ? "Pause" : shown().dataset.label;
  };
  for (const video of races.flatMap((race) => [...race.querySelectorAll("video")])) {
    video.addEventListener("timeupdate", () => tell(video));
    for (const name of ["play", "pause", "ended"]) video.addEventListener(name, label);
  }
  button.addEventListener("click", () => {
    const ones = videos();
    if (isPlaying()) return ones.forEach((video) => video.pause());
    const areDone = ones.every((video) => video.ended || !video.currentTime);
    ones.forEach((video) => {
      video.playbackRate = video.dataset.rate * shown().dataset.speedup;
      if (areDone) video.currentTime = 0;
      if (areDone || !video.ended) video.play();
    });
  });
  choice.addEventListener("change", () => {
    videos().forEach((video) => video.pause());
    races.forEach((race) => { race.hidden = race.dataset.key !== choice.value; });
    label();
  });
  races.forEach((race, index) => { race.hidden = index > 0; });
  label();
})();
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
