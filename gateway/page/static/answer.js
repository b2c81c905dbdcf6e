// One answer of a model: what is sent for it, and how its chunks come together.
import { failure, stream } from "./api.js";

/** Return what the model is sent: the system prompt and every message that says something. A call whose result is missing is left out: servers refuse it, and all that follows it. */
export function history({ system, messages }) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const [at, { role, content, tool_calls, tool_call_id }] of messages.entries()) {
    if (role === "tool") sent.push({ role, content, tool_call_id });
    else if (messages[at + 1]?.role === "tool") sent.push({ role, content: content || null, tool_calls });
    else if (content) sent.push({ role, content });
  }
  return sent;
}

/** Ask for an answer to `conversation` and write it into `answer`, calling `changed` after each chunk. */
export async function ask(conversation, answer, signal, changed) {
  const body = {
    model: conversation.model,
    messages: history(conversation),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    include_timings: true,
  };
  if (conversation.temperature) body.temperature = Number(conversation.temperature);
  if (conversation.max_tokens) body.max_tokens = Number(conversation.max_tokens);
  if (conversation.tools) body.tools = JSON.parse(conversation.tools);
  const began = performance.now();
  let first = null;
  answer.stats = {};
  try {
    for await (const chunk of stream(body, signal)) {
      const choice = chunk.choices?.[0];
      const delta = choice?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) first ??= performance.now();
      answer.content += delta.content ?? "";
      answer.reasoning += delta.reasoning_content ?? "";
      for (const part of delta.tool_calls ?? []) join(answer.tool_calls, part);
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      const { completion_tokens: tokens, timings } = chunk.usage ?? {};
      if (tokens) {
        answer.stats.tokens = tokens;
        if (first !== null) answer.stats.first = (first - began) / 1000;
        // The server's time: the chunks that a busy browser finds waiting took none by its own clock.
        if (timings?.generation_ms) answer.stats.rate = ((tokens - 1) * 1000) / timings.generation_ms;
      }
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.stopped = true;
    else answer.error = failure(error);
  }
}

/** Add a part of a call: the first has its id and name, all have some of its arguments. */
function join(calls, { index, id, function: { name, arguments: text } = {} }) {
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (id) call.id = id;
  call.function.name += name ?? "";
  call.function.arguments += text ?? "";
}
