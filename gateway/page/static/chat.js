// The view Chat: conversations, the one that is open, and the answers that are being written.
import { ask } from "./answer.js";
import { Failure, call, explain, failure } from "./api.js";
import { by, composing, download, h, sends, toast, update } from "./dom.js";
import { messageElement } from "./messages.js";
import { all, choice, follow, newId, place, put, remove } from "./store.js";
import { t } from "./words.js";

const FIELDS = ["system", "temperature", "max_tokens", "tools"];
const DRAW_MS = 80;
const KEEP_MS = 2000;

const conversations = new Map();
const running = new Map(); // conversation -> AbortController
let models = [];
let why = null; // there are none
let current = fresh(); // a question can be asked before anything has been read

/** Begin, and read what the browser keeps and which models there are. */
export async function openChat() {
  const [first, before] = [current, place()];
  showConversation();
  question.focus({ preventScroll: true });
  fetchModels();
  follow(takeOver);
  try {
    for (const conversation of await all()) {
      const end = conversation.messages.at(-1);
      if (end?.role === "assistant" && !end.finish && !end.error) end.stopped = true; // the page was left before it ended
      if (!conversations.has(conversation.id)) conversations.set(conversation.id, conversation);
    }
  } catch {
    toast(t("notKept"));
  }
  if (current === first && !first.messages.length && conversations.has(before)) open(conversations.get(before));
  else showList();
}

/** Stop the answer of the open conversation; return whether there was one. */
export function stopAnswer() {
  const controller = running.get(current);
  controller?.abort();
  return controller !== undefined;
}

/** Show everything again, as after a change of language; what is being typed stays. */
export function refresh() {
  showModels();
  showList();
  if (!isEdited()) showConversation();
}

function fresh() {
  const conversation = { id: newId(), title: "", updated: 0, messages: [], model: chosenModel() };
  for (const field of FIELDS) conversation[field] = choice(field);
  return conversation;
}

function open(conversation) {
  current = conversation;
  showModels();
  showList();
  showConversation();
  by("question").focus({ preventScroll: true });
}

async function save(conversation) {
  conversation.updated = Math.max(Date.now(), conversation.updated + 1); // no two of what is kept have the same
  conversations.set(conversation.id, conversation);
  try {
    const theirs = await put(conversation);
    if (!theirs) return;
    conversations.set(theirs.id, theirs).set(conversation.id, conversation);
    showList();
    toast(t("kept"));
  } catch {
    toast(t("notKept"));
  }
}

/** Take over what another tab has written or removed, unless this one has something of its own there: that is kept when it is saved. */
function takeOver(id, theirs) {
  const mine = conversations.get(id);
  if (running.has(mine) || (mine === current && isEdited())) return;
  if (theirs) conversations.set(id, theirs);
  else conversations.delete(id);
  if (mine === current) {
    current = theirs ?? fresh();
    showModels();
    showConversation();
  }
  showList();
}

const isEdited = () => by("title").value !== current.title || [...by("log").querySelectorAll("textarea")].some((field) => field.value);

// Models.

/** Read which models there are; return why there is none, if so. */
async function fetchModels() {
  try {
    models = (await (await call("v1/models")).json()).data;
    if (!models.length) throw new Failure(404, { code: "no_model" });
    why = null;
  } catch (error) {
    models = [];
    why = failure(error);
  }
  showModels();
  return why;
}

function chosenModel() {
  const last = choice("model");
  return models.some((model) => model.id === last) ? last : (models.find((model) => model.ready) ?? models[0])?.id ?? "";
}

function showModels() {
  current.model ||= chosenModel();
  const known = models.map((model) => [model.id, model.ready ? model.id : `${model.id} (${t(model.unloaded ? "notLoaded" : "notReady")})`]);
  if (!models.some((model) => model.id === current.model)) known.unshift([current.model, current.model || t(why?.status === 401 ? "keyNeeded" : "noModels")]);
  by("model").replaceChildren(...known.map(([value, text]) => h("option", { value, selected: value === current.model }, text)));
}

// The list.

function showList() {
  const wanted = by("search").value.trim().toLowerCase();
  const says = (conversation) => [conversation.title, ...conversation.messages.map((message) => message.content ?? "")].join("\n").toLowerCase();
  const found = [...conversations.values()].filter((each) => says(each).includes(wanted)).sort((a, b) => b.updated - a.updated);
  const today = new Date().setHours(0, 0, 0, 0);
  const items = [];
  let group = "";
  for (const conversation of found) {
    const now = conversation.updated >= today ? "today" : "earlier";
    if (now !== group) items.push(h("li", { class: "group" }, t(now)));
    group = now;
    items.push(h("li", {}, h("a", { href: "#chat", "aria-current": conversation === current && "true", onclick: () => open(conversation) },
      running.has(conversation) && h("span", { class: "dot good" }), conversation.title || t("untitled"))));
  }
  by("list").replaceChildren(...items);
  by("none").hidden = found.length > 0;
  by("none").textContent = t(wanted ? "nothingFound" : "nothing");
}

// The open conversation.

const act = {
  async edit(at, content) {
    await replace(at, { role: "user", content });
  },
  async retry(at) {
    await replace(at);
  },
  async results(results) {
    current.messages.push(...results);
    await answer(current);
  },
};

/** Continue from before message `at`, with another one in its place if there is one. What was there can be had back. */
async function replace(at, ...messages) {
  const conversation = current;
  running.get(conversation)?.abort();
  const before = conversation.messages;
  conversation.messages = [...before.slice(0, at), ...messages];
  const more = before.length > at + 1;
  if (more || before[at].content || before[at].tool_calls.length) { // an answer that failed is not missed
    toast(t(more ? "replaced" : "answerReplaced"), t("undo"), () => {
      running.get(conversation)?.abort();
      conversation.messages = before;
      save(conversation);
      open(conversation);
    });
  }
  await answer(conversation);
}

async function answer(conversation) {
  const controller = new AbortController();
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], model: conversation.model };
  const asked = { ...conversation, messages: conversation.messages };
  conversation.messages = [...conversation.messages, message];
  running.set(conversation, controller);
  save(conversation);
  showModels();
  showList();
  showConversation();
  by("scroll").scrollTop = by("scroll").scrollHeight;
  if (!conversation.model) { // the page has just opened, or the gateway or the key was not there when it did
    message.error = await fetchModels();
    asked.model = message.model = conversation.model ||= chosenModel();
  }
  let drawn = null;
  let kept = null; // what the page may be left with in the middle of the answer
  if (!message.error) await ask(asked, message, controller.signal, () => {
    drawn ??= setTimeout(() => { drawn = null; if (current === conversation) showLast(message); }, DRAW_MS);
    kept ??= setTimeout(() => { kept = null; if (conversations.has(conversation.id)) save(conversation); }, KEEP_MS);
  });
  clearTimeout(drawn);
  clearTimeout(kept);
  if (running.get(conversation) === controller) running.delete(conversation);
  if (conversations.has(conversation.id)) await save(conversation);
  if (message.error) await fetchModels();
  showList();
  if (current === conversation) {
    showLast(message);
    showState();
    if (message.error?.status === 401) openSettings("key", message.error);
    else if (message.tool_calls.length && !message.error && !message.stopped) by("log").querySelector(".results textarea")?.focus();
  }
}

function showConversation() {
  place(current.id);
  by("title").value = current.title;
  by("log").replaceChildren(...current.messages.map((_, at) => element(at)));
  by("scroll").scrollTop = by("scroll").scrollHeight;
  showState();
}

const element = (at) => {
  const last = at === current.messages.length - 1;
  return messageElement(current, at, last && running.has(current), act);
};

/** Show again what has changed of the last message; who reads further above stays there. */
function showLast(message) {
  if (current.messages.at(-1) !== message) return;
  const box = by("scroll");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  update(by("log").lastElementChild, element(current.messages.length - 1));
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function showState() {
  const busy = running.has(current);
  const begun = current.messages.length > 0;
  by("head").hidden = !begun;
  by("welcome").hidden = begun;
  by("chat-view").classList.toggle("empty", !begun);
  if (document.activeElement === by(busy ? "send" : "stop")) by("question").focus();
  by("send").hidden = busy;
  by("stop").hidden = !busy;
  document.title = current.title ? `${current.title} · tritongate` : "tritongate";
}

// What the user does.

const question = by("question");

by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || running.has(current)) return;
  question.value = "";
  fit();
  current.title ||= [...text.split("\n")[0]].slice(0, 60).join("");
  current.messages.push({ role: "user", content: text });
  answer(current);
});
question.addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    by("composer").requestSubmit();
  }
});
const fit = () => { question.rows = Math.min(10, question.value.split("\n").length); };
question.addEventListener("input", fit);
by("stop").addEventListener("click", stopAnswer);

by("new").addEventListener("click", () => {
  location.hash = "#chat";
  open(fresh());
});
by("search").addEventListener("input", showList);
by("search").addEventListener("keydown", (event) => {
  if (!composing(event) && (event.key === "ArrowDown" || event.key === "Enter")) { event.preventDefault(); by("list").querySelector("a")?.focus(); }
});
by("list").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const links = [...by("list").querySelectorAll("a")];
  (links[links.indexOf(document.activeElement) + step] ?? by("search")).focus();
});
by("model").addEventListener("change", (event) => {
  current.model = choice("model", event.target.value);
  if (current.messages.length) save(current);
});
by("model").addEventListener("pointerdown", async () => {
  if (!models.length) await fetchModels();
});
by("title").addEventListener("change", async (event) => {
  current.title = event.target.value = event.target.value.trim() || t("untitled");
  await save(current);
  showList();
  showState();
});
by("title").addEventListener("keydown", (event) => {
  if (sends(event)) question.focus();
});

const written = (message) => {
  const tools = (message.tool_calls ?? []).map((each) => `\`${each.function.name}(${each.function.arguments})\``);
  const who = { user: t("you"), assistant: message.model, tool: t("toolResult") }[message.role];
  return [`## ${who}`, message.content, ...tools].filter(Boolean).join("\n\n");
};
by("export").addEventListener("click", () => {
  const name = current.title.replace(/[\\/:*?"<>|\s]+/g, " ").trim() || "conversation";
  const system = current.system ? [`> ${current.system.replaceAll("\n", "\n> ")}`] : [];
  download(`${name}.md`, "text/markdown", [`# ${current.title}`, ...system, ...current.messages.map(written)].join("\n\n") + "\n");
});
by("export-all").addEventListener("click", () => {
  download("tritongate.json", "application/json", JSON.stringify([...conversations.values()], null, 2));
});
by("delete").addEventListener("click", () => {
  const gone = current;
  running.get(gone)?.abort();
  conversations.delete(gone.id);
  remove(gone.id).catch(() => {});
  open(fresh()); // at once: later it would take the focus from where the user is by then
  toast(t("deleted"), t("undo"), () => { save(gone); open(gone); });
});

// Settings.

/** Show the settings; `refused`: why the key is asked for. */
function openSettings(field, refused = null) {
  by("key-error").hidden = refused === null;
  by("key-error").textContent = refused && explain(refused).text;
  if (!by("settings").open) { // else somebody types there
    for (const name of FIELDS) by(name).value = current[name] ?? "";
    by("key").value = choice("key");
    by("tools").setCustomValidity(""); // what is kept is a list
    by("settings").showModal();
  }
  by(field).focus();
}

by("open-settings").addEventListener("click", () => openSettings("system"));
by("tools").addEventListener("input", ({ target }) => target.setCustomValidity(isList(target.value) ? "" : t("toolsWrong")));
by("settings").addEventListener("close", async () => {
  for (const name of FIELDS) { // Esc closes whatever was typed
    if (by(name).checkValidity()) current[name] = choice(name, by(name).value.trim());
  }
  const other = by("key").value.trim() !== choice("key");
  choice("key", by("key").value.trim());
  if (current.messages.length) await save(current);
  if (other && (await fetchModels())?.code === "unknown_key") openSettings("key", why);
});

function isList(text) {
  try {
    return !text.trim() || Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}
