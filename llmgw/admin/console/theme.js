// Before the first paint, so that a page that is set to dark does not flash. Decides nothing else.
(() => {
  try {
    const chosen = localStorage.getItem("llmgw-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage is switched off: the system's theme it is */ }
})();
