// Light or dark: what the visitor chose here, else what their system says. Runs before the first paint.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("deft-theme") ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = chosen;
    dispatchEvent(new Event("themechange"));
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      localStorage.setItem("deft-theme", next);
      apply();
    });
  });
})();
