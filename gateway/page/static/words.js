// Every text of the page, in each of its languages.
import { choice } from "./store.js";

const WORDS = {
  en: {
    skip: "Skip to the message", conversations: "Conversations", newConversation: "New conversation",
    search: "Search conversations", menu: "Menu", views: "Views", chat: "Chat", load: "Load", model: "Model",
    settings: "Settings", title: "Title", export: "Export", delete: "Delete", messages: "Messages",
    welcome: "What would you like to know?",
    welcomeNote: "Conversations stay in this browser. The model sees what you send, and nothing else.",
    ask: "Ask something", send: "Send", stop: "Stop",
    keys: "Enter sends, Shift+Enter starts a new line, Esc stops, Ctrl+K searches",
    ofConversation: "This conversation and new ones", ofBrowser: "This browser",
    system: "System prompt", systemExample: "You are a helpful assistant.", temperature: "Temperature",
    length: "Longest answer, in tokens", default: "default", tools: "Tools, as OpenAI's JSON",
    toolsNote: "A list of functions that the model may call. You give the results yourself.",
    toolsWrong: "This is not a JSON list.",
    key: "API key", keyNote: "Kept in this browser, and sent to this gateway alone.",
    exportAll: "Export all conversations", done: "Done",
    you: "You", copy: "Copy", copied: "Copied", notCopied: "Not allowed here", edit: "Edit", retry: "Retry",
    save: "Send again", cancel: "Cancel", undo: "Undo", deleted: "The conversation was deleted.",
    replaced: "The messages after it were replaced.", answerReplaced: "The answer was replaced.", code: "Code", table: "Table",
    thinking: "Thinking …", thought: "Thoughts", calls: "Calls a tool", result: "Result", giveResult: "Send the result",
    toolResult: "Result of the tool", writing: "The answer is being written",
    tokens: "{n} tokens", first: "first after {n} s", rate: "{n} tokens/s",
    stopped: "Stopped", cut: "Longest length reached", untitled: "New conversation", nothing: "No conversation yet.",
    nothingFound: "Nothing found.", today: "Today", earlier: "Earlier",
    notReady: "not ready", notLoaded: "not loaded", ready: "ready", noModels: "no model",
    unreachable: "The gateway cannot be reached. Is it running?",
    lost: "The connection was lost in the middle of the answer. What had arrived is kept.",
    tooLong: "The conversation is longer than the model can read. Start a new one, or shorten it.",
    busy: "Too many requests right now. Try again in a moment.",
    busyFor: "Too many requests right now. Try again in {time}.",
    usedUp: "Your key has used what it may use in a day. Try again in {time}.",
    noneForKey: "Your key allows none of this gateway's models.", none: "This gateway has no model yet.",
    status401: "This gateway wants an API key. Enter it in the settings.", keyUnknown: "The gateway does not know this key.",
    keyNeeded: "API key needed",
    status403: "Your key does not allow this.", status404: "The gateway does not have this.",
    status413: "The conversation is too large to send.", status503: "No model can answer right now. Try again soon.",
    status504: "The answer took longer than the gateway allows.",
    refused: "The gateway refused the request.", failed: "The answer failed.",
    kept: "Another tab has changed this conversation. What this tab has is kept as a copy.",
    notKept: "The browser could not keep this conversation: export it before you leave.",
    loadNote: "What this gateway does now, and the minutes since this view was opened.", models: "Models",
    running: "Running", waiting: "Waiting", speed: "Tokens/s", memory: "KV memory", state: "State", context: "Context",
    actions: "Actions", address: "Address", loadModel: "Load", unloadModel: "Unload", loading: "Loading …",
    sure: "Unload {name}? Nobody can use it until it is loaded again.",
    unloading: "Unloading …", healthy: "healthy", unhealthy: "does not answer", ago: "{n} min ago", now: "now",
    chart: "{name}: now {now}, highest {most}", theme: "Theme: {name}", auto: "system", light: "light", dark: "dark",
  },
  zh: {
    skip: "跳到输入框", conversations: "对话", newConversation: "新对话",
    search: "搜索对话", menu: "菜单", views: "视图", chat: "对话", load: "负载", model: "模型",
    settings: "设置", title: "标题", export: "导出", delete: "删除", messages: "消息",
    welcome: "想聊点什么？", welcomeNote: "对话只保存在这个浏览器里；模型只看到你发送的内容。",
    ask: "输入你的问题", send: "发送", stop: "停止",
    keys: "Enter 发送，Shift+Enter 换行，Esc 停止，Ctrl+K 搜索",
    ofConversation: "本对话与新对话", ofBrowser: "本浏览器",
    system: "系统提示词", systemExample: "你是一个乐于助人的助手。", temperature: "温度",
    length: "回答最多的 token 数", default: "默认", tools: "工具（OpenAI 的 JSON 格式）",
    toolsNote: "模型可以调用的函数列表；调用结果由你填写。", toolsWrong: "这不是 JSON 列表。",
    key: "API 密钥", keyNote: "保存在这个浏览器里，只发送给本网关。",
    exportAll: "导出全部对话", done: "完成",
    you: "你", copy: "复制", copied: "已复制", notCopied: "浏览器不允许", edit: "编辑", retry: "重试",
    save: "重新发送", cancel: "取消", undo: "撤销", deleted: "对话已删除。",
    replaced: "其后的消息已被替换。", answerReplaced: "回答已被替换。", code: "代码", table: "表格",
    thinking: "思考中……", thought: "思考过程", calls: "调用工具", result: "结果", giveResult: "提交结果",
    toolResult: "工具返回", writing: "正在生成回答",
    tokens: "{n} 个 token", first: "首个用时 {n} 秒", rate: "每秒 {n} 个",
    stopped: "已停止", cut: "已达到长度上限", untitled: "新对话", nothing: "还没有对话。",
    nothingFound: "没有找到。", today: "今天", earlier: "更早",
    notReady: "未就绪", notLoaded: "未加载", ready: "就绪", noModels: "没有模型",
    unreachable: "无法连接到网关。它在运行吗？", lost: "回答中途连接断开。已收到的内容保留在此。",
    tooLong: "对话超过了模型能读取的长度。请开始新对话，或缩短内容。",
    busy: "当前请求过多，请稍后再试。", busyFor: "当前请求过多，请在{time}后重试。",
    usedUp: "你的密钥已用完今天的额度，请在{time}后重试。",
    noneForKey: "你的密钥不能使用此网关的任何模型。", none: "此网关还没有模型。",
    status401: "此网关需要 API 密钥，请在设置中填写。", keyUnknown: "网关不认识这个密钥。", keyNeeded: "需要 API 密钥", status403: "你的密钥没有这项权限。",
    status404: "网关上没有找到。", status413: "对话太大，无法发送。", status503: "目前没有模型可以回答，请稍后再试。",
    status504: "回答超过了网关允许的时间。", refused: "网关拒绝了这个请求。", failed: "回答失败。",
    kept: "另一个标签页修改了这个对话；此标签页的内容已另存为副本。",
    notKept: "浏览器无法保存这个对话：离开前请先导出。",
    loadNote: "网关此刻的状态，以及打开本视图以来的几分钟。", models: "模型",
    running: "运行中", waiting: "等待中", speed: "token/秒", memory: "KV 缓存", state: "状态", context: "上下文",
    actions: "操作", address: "地址", loadModel: "加载", unloadModel: "卸载", loading: "加载中……",
    sure: "卸载 {name}？重新加载之前，任何人都无法使用它。",
    unloading: "卸载中……", healthy: "正常", unhealthy: "没有响应", ago: "{n} 分钟前", now: "现在",
    chart: "{name}：当前 {now}，最高 {most}", theme: "主题：{name}", auto: "跟随系统", light: "浅色", dark: "深色",
  },
};

export const LANGUAGES = { en: "English", zh: "中文" };

/** Return the language in use: the chosen one, or the browser's. */
export const language = () => choice("language") || (navigator.language.startsWith("zh") ? "zh" : "en");

/** Return a text in the language in use, with its `{names}` filled in. */
export const t = (name, values = {}) =>
  WORDS[language()][name].replace(/\{(\w+)\}/g, (_, key) => values[key]);

/** Write the texts of the document itself. */
export function translate() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  for (const [attribute, target] of [["t", null], ["t-label", "aria-label"], ["t-placeholder", "placeholder"]]) {
    for (const element of document.querySelectorAll(`[data-${attribute}]`)) {
      const text = t(element.getAttribute(`data-${attribute}`));
      if (target) element.setAttribute(target, text);
      else element.textContent = text;
    }
  }
}
