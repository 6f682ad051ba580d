// What the page asks of its server, and what the server says in return. Nothing else makes requests.

import { dataOf } from "./events.js";

const NONE_YET = "No model can be served yet: no target has answered the server. It is offered here when one runs.";
const END = "[DONE]";
const UNREACHABLE = "The server cannot be reached. Is it still running?";
const CUT = "The stream ended before the text did: the connection was lost, or the server was stopped.";

/** Why there is no (further) output, in words. */
export class ServerError extends Error {
  /** `status` 0: no reply; `field`: the part of the request that is at fault, if one is. */
  constructor(message, status = 0, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

/** What is served, at least one: [{ name, drafters, methods, context, chats }]. */
export async function models(key) {
  const response = await ask("v1/models", { headers: headersOf(key) });
  const { data, detail } = await response.json();
  if (!data.length) throw new ServerError([NONE_YET, ...detail].join("\n"));
  return data.map(({ id, max_model_len: context, ...more }) => ({ ...more, name: id, context }));
}

/**
 * Yields what happens to one output, in order: { token: { text, kind } }, { spans: [...] }, and
 * { end: { reason, statistics, message } } at last, with what a chat goes on from. Aborting the signal makes the server drop the output.
 */
export async function* complete(request, key, signal) {
  const headers = { "Content-Type": "application/json", ...headersOf(key) };
  const response = await ask(request.messages ? "v1/chat/completions" : "v1/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
  let ended = false;
  const message = { role: "assistant", content: "" };
  for await (const data of read(response)) {
    if (data === END) break;
    for (const event of eventsOf(JSON.parse(data), message)) {
      ended ||= "end" in event;
      yield event;
    }
  }
  if (!ended) throw new ServerError(CUT);
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(UNREACHABLE);
  }
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function refusalOf(response) {
  const { error } = await response.json().catch(() => ({}));
  const after = response.headers.get("Retry-After");
  const words = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  return new ServerError(after ? `${words} (try again in ${after} s)` : words, response.status, error?.param);
}

async function* read(response) {
  try {
    yield* dataOf(response.body);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(CUT);
  }
}

function* eventsOf({ error, choices = [], crossdraft }, message) {
  if (error) throw new ServerError(error.message, 0, error.param);
  const [choice] = choices;
  if (crossdraft?.spans?.length) yield { spans: crossdraft.spans };
  const text = choice?.text ?? added(choice?.delta ?? {}, message);
  if (crossdraft?.kind) yield { token: { text, kind: crossdraft.kind } };
  if (crossdraft?.statistics) yield { end: { reason: choice?.finish_reason, statistics: crossdraft.statistics, message } };
}

/** Adds what came to a message of the assistant; returns how it is shown. */
function added({ content, tool_calls: pieces = [] }, message) {
  message.content += content ?? "";
  for (const { index, function: { arguments: text = "", ...called }, ...more } of pieces) {
    message.tool_calls ??= [];
    message.tool_calls[index] ??= { ...more, function: { ...called, arguments: "" } };
    message.tool_calls[index].function.arguments += text;
  }
  return (content ?? "") + pieces.map(({ function: called }) => callText(called)).join("");
}

/** A call of a tool, or a piece of one, as it is shown. */
export function callText({ name, arguments: text = "" }) {
  return (name ? `→ ${name} ` : "") + text;
}
