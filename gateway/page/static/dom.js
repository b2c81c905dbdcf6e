// Elements without markup in strings: what is text stays text.

/** Return the element with this id. */
export const by = (id) => document.getElementById(id);

/** Make an element: `on…` properties are listeners, `class` and the rest attributes; false and null are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  set(element, properties);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
}

/** Make `shown` like `made`, and leave alone what has not changed since the last time: a press, a selection, the focus and a scrolled block need elements that stay. */
export function update(shown, made) {
  const next = made.cloneNode(true);
  patch(shown, shown.made ?? shown.cloneNode(true), made);
  shown.made = next; // and not what is shown: somebody may have unfolded or copied something there
}

function patch(shown, before, made) {
  for (const { name, value } of made.attributes) if (before.getAttribute(name) !== value) shown.setAttribute(name, value);
  for (const { name } of before.attributes) if (!made.hasAttribute(name)) shown.removeAttribute(name);
  const [here, were, now] = [shown, before, made].map(({ childNodes }) => [...childNodes]);
  for (const [at, node] of now.entries()) {
    const was = were[at];
    if (was?.nodeName !== node.nodeName || was.className !== node.className) here[at] ? here[at].replaceWith(node) : shown.append(node);
    else if (was.nodeType === Node.ELEMENT_NODE) patch(here[at], was, node);
    else if (node.data.startsWith(was.data)) here[at].appendData(node.data.slice(was.data.length)); // a selection in it stays
    else here[at].data = node.data;
  }
  for (const node of here.slice(now.length)) node.remove();
}

/** Whether a key is the input method's: Enter and arrows choose among its candidates, Escape gives them up; 229: Safari tells so alone. */
export const composing = (event) => event.isComposing || event.keyCode === 229;

/** Whether a key sends what was typed. Keyboards on a touch screen have no Shift+Enter for a new line; there, the button sends. */
export const sends = (event) => event.key === "Enter" && !composing(event) && (event.ctrlKey || event.metaKey || (!event.shiftKey && !matchMedia("(pointer: coarse)").matches));

/** Let the user save `text` as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

let fading;
/** Say something at the bottom of the window for a while, with one thing that may be done about it. */
export function toast(text, label, action) {
  const button = label && h("button", { type: "button", class: "plain", onclick: () => { hide(); action(); } }, label);
  by("toast").replaceChildren(h("span", {}, text), ...(button ? [button] : []));
  clearTimeout(fading);
  fading = setTimeout(hide, 10_000);
}
const hide = () => by("toast").replaceChildren();
