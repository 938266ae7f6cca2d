// Runs before the first paint, so that a chosen theme does not flash: everything else is a module and comes later.
try {
  const theme = localStorage.getItem("penstock.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is closed to this page: the system's theme it is.
}
