// Puts the page together: views, language, theme, the drawer of small screens.
import { openChat, refresh, stopAnswer } from "./chat.js";
import { by, composing } from "./dom.js";
import { show, watch } from "./load.js";
import { choice } from "./store.js";
import { LANGUAGES, language, t, translate } from "./words.js";

const THEMES = ["auto", "light", "dark"];

function write() {
  translate();
  const other = language() === "zh" ? "en" : "zh";
  by("language").textContent = LANGUAGES[other];
  by("language").lang = other === "zh" ? "zh-CN" : "en";
  by("theme").textContent = t("theme", { name: t(document.documentElement.dataset.theme) });
}

function view() {
  const load = location.hash === "#load";
  by("chat-view").hidden = load;
  by("load-view").hidden = !load;
  by("model").hidden = by("open-settings").hidden = load;
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.hash === (load ? "#load" : "#chat")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (load) show();
  watch(load && !document.hidden);
}

function drawer(open) {
  document.body.classList.toggle("drawer", open);
  by("menu").setAttribute("aria-expanded", open);
  by("page").inert = open;
  (open ? by("new") : by("menu")).focus();
}

by("language").addEventListener("click", () => {
  choice("language", language() === "zh" ? "en" : "zh");
  write();
  refresh();
  show();
});
by("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = choice("theme", THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length]);
  write();
});
by("menu").addEventListener("click", () => drawer(true));
by("veil").addEventListener("click", () => drawer(false));
by("sidebar").addEventListener("click", (event) => {
  if (document.body.classList.contains("drawer") && event.target.closest("#list a, #new")) drawer(false);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (getComputedStyle(by("menu")).display !== "none") drawer(true);
    by("search").focus();
  } else if (event.key === "Escape" && !composing(event) && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("drawer")) drawer(false);
    else if (!stopAnswer()) by("question").focus();
  }
});
addEventListener("hashchange", view);
document.addEventListener("visibilitychange", view);

write();
view();
openChat();
