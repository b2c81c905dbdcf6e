// Runs before the first paint, so that a chosen theme does not flash in from the other one.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";
