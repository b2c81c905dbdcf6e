// Answers as HTML. An answer is hostile until shown otherwise: markdown-it passes no HTML through, DOMPurify
// goes over what it made, and the page's Content-Security-Policy lets nothing run or load that came past both.
import { h } from "./dom.js";
import { t } from "./words.js";

const md = globalThis.markdownit({ html: false, linkify: true, breaks: true });
// A picture would be a request to somebody's server: a link to it asks first.
md.renderer.rules.image = (tokens, at) => {
  const { escapeHtml } = md.utils;
  const address = tokens[at].attrGet("src");
  return `<a href="${escapeHtml(address)}">${escapeHtml(tokens[at].content || address)}</a>`;
};
// Inline styles are not allowed here; alignment is a class.
for (const rule of ["th_open", "td_open"]) {
  md.renderer.rules[rule] = (tokens, at, options, _env, self) => {
    const style = tokens[at].attrGet("style");
    if (style) {
      tokens[at].attrs = tokens[at].attrs.filter(([name]) => name !== "style");
      tokens[at].attrSet("class", style.replace("text-align:", ""));
    }
    return self.renderToken(tokens, at, options);
  };
}

const CLEAN = {
  ALLOWED_TAGS: "a p br hr strong em s code pre ul ol li blockquote h1 h2 h3 h4 h5 h6 table thead tbody tr th td".split(" "),
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Return `text` as nodes: links that open elsewhere, code with a button to copy it, tables that scroll. */
export function render(text) {
  const fragment = globalThis.DOMPurify.sanitize(md.render(text), CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  // The message's own heading is an h2: those within it go below, without gaps.
  const headings = [...fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")];
  const levels = [...new Set(headings.map(({ tagName }) => tagName))].sort();
  for (const heading of headings) {
    const lower = h(`h${Math.min(6, levels.indexOf(heading.tagName) + 3)}`);
    lower.append(...heading.childNodes);
    heading.replaceWith(lower);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = h("div", { class: "table", role: "region", tabindex: 0, "aria-label": t("table") });
    table.replaceWith(box);
    box.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = /language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
    const button = h("button", { type: "button", class: "plain", onclick: () => copy(button, pre.textContent) }, t("copy"));
    const box = h("div", { class: "block" }, h("div", { class: "block-head" }, h("span", {}, language), button));
    pre.replaceWith(box);
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", t("code"));
    box.append(pre);
  }
  return fragment;
}

/** Put `text` on the clipboard, and say so on the button for a moment. */
export async function copy(button, text) {
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false) ?? copyOld(button, text);
  button.textContent = t(done ? "copied" : "notCopied");
  setTimeout(() => { button.textContent = t("copy"); }, 2000);
}

/** The same where `navigator.clipboard` is missing: browsers have it on https and loopback alone. */
function copyOld(button, text) {
  const field = h("textarea", { class: "unseen", readonly: true }, text);
  document.body.append(field);
  field.focus({ preventScroll: true });
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  button.focus({ preventScroll: true });
  return done;
}
