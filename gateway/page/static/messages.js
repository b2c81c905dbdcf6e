// How messages look. What they do is handed in as `act`.
import { explain } from "./api.js";
import { composing, h, sends } from "./dom.js";
import { copy, render } from "./markdown.js";
import { t } from "./words.js";

/** Return the element of message `at` of `conversation`; `running`: it is being written. */
export function messageElement(conversation, at, running, act) {
  const message = conversation.messages[at];
  const make = { user: question, assistant: answer, tool: result }[message.role];
  return make(message, { at, running, act, last: at === conversation.messages.length - 1 });
}

const plain = (label, onclick) => h("button", { type: "button", class: "plain", onclick }, label);
const copyButton = (text) => {
  const button = plain(t("copy"), () => copy(button, text));
  return button;
};

function question(message, { at, act }) {
  const text = h("div", { class: "said" }, message.content);
  const element = h("article", { class: "question", "aria-label": t("you") }, text,
    h("div", { class: "under" }, plain(t("edit"), edit), copyButton(message.content)));

  function edit() {
    const before = [...element.childNodes];
    const field = h("textarea", { "aria-label": t("edit"), rows: Math.min(12, message.content.split("\n").length + 1) });
    field.value = message.content;
    const back = () => { element.replaceChildren(...before); element.querySelector("button").focus(); };
    const form = h("form", { class: "editing", onsubmit: (event) => {
      event.preventDefault();
      if (field.value.trim()) act.edit(at, field.value);
    } }, field, h("div", { class: "row end" }, plain(t("cancel"), back), h("button", { class: "main" }, t("save"))));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !composing(event)) { event.stopPropagation(); back(); }
      if (event.target === field && sends(event)) { event.preventDefault(); form.requestSubmit(); }
    });
    element.replaceChildren(form);
    field.focus();
  }
  return element;
}

function answer(message, { at, running, act, last }) {
  const parts = [];
  if (message.reasoning) {
    parts.push(h("details", { class: "thoughts", open: message.unfolded, ontoggle: (event) => { message.unfolded = event.target.open; } },
      h("summary", {}, t(running && !message.content ? "thinking" : "thought")), h("div", { class: "prose" }, render(message.reasoning))));
  }
  if (message.content) parts.push(h("div", { class: "prose" }, render(message.content)));
  if (message.tool_calls.length) parts.push(...calls(message, !running && last && !message.error && !message.stopped, act));
  if (running && !message.content && !message.tool_calls.length) parts.push(h("span", { class: "waiting", role: "img", "aria-label": t("writing") }));
  if (message.error) {
    const { text, detail } = explain(message.error);
    parts.push(h("div", { class: "error", role: "alert" }, h("p", {}, text), detail && h("p", { class: "quiet" }, detail)));
  }
  if (!running) {
    parts.push(h("div", { class: "under" }, message.content && copyButton(message.content), plain(t("retry"), () => act.retry(at)),
      h("span", { class: "stats" }, stats(message))));
  }
  return h("article", { class: "answer", "aria-label": message.model, "aria-busy": running },
    h("h2", { class: "unseen" }, message.model || t("messages")), ...parts);
}

function stats({ stats: { tokens, first, rate } = {}, stopped, finish }) {
  const of = (name, n) => t(name, { n });
  return [
    tokens && of("tokens", tokens.toLocaleString()),
    first && of("first", first < 10 ? first.toFixed(2) : Math.round(first)),
    rate && of("rate", rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString()),
    stopped && t("stopped"),
    finish === "length" && t("cut"),
  ].filter(Boolean).join(" · ");
}

const indented = (text) => {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
};

function calls(message, open, act) {
  const cards = message.tool_calls.map((call) => {
    const field = open && h("textarea", { rows: 2, "aria-label": `${t("result")}: ${call.function.name}`, placeholder: t("result"), required: true });
    return h("section", { class: "call" }, h("p", { class: "quiet" }, t("calls")), h("p", { class: "name" }, call.function.name),
      h("pre", { tabindex: 0, role: "region", "aria-label": t("code") }, indented(call.function.arguments)), field);
  });
  if (!open) return cards;
  return [h("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    const values = [...event.target.querySelectorAll("textarea")].map((field) => field.value);
    act.results(message.tool_calls.map(({ id }, number) => ({ role: "tool", tool_call_id: id, content: values[number] })));
  } }, ...cards, h("div", { class: "row end" }, h("button", { class: "main" }, t("giveResult"))))];
}

function result(message) {
  return h("article", { class: "call result", "aria-label": t("toolResult") }, h("p", { class: "quiet" }, t("toolResult")),
    h("pre", { tabindex: 0, role: "region", "aria-label": t("result") }, message.content));
}
