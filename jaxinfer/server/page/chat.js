// The chat box: one conversation, streamed. A model without a chat template continues the text instead.

import { ApiError, events, request } from "./stream.js";

const byId = (id) => document.getElementById(id);
const log = byId("log"), input = byId("input"), send = byId("send"), stop = byId("stop");
const announce = byId("announce"), empty = byId("empty");

let turns = []; // {role, content}, what the model is told
let running = null; // the AbortController of the answer in progress
let server = null; // {model, chat, max_model_len}, once the server has said it

function meet(hello) {
  server = hello;
  byId("chat-title").textContent = server.chat ? "Chat" : "Continue a text";
}
document.addEventListener("hello", (event) => meet(event.detail));

function addMessage(role, title) {
  empty.hidden = true;
  const article = document.createElement("article");
  article.className = `message ${role}`;
  const part = (tag, name, text = "") => {
    const element = document.createElement(tag);
    element.className = name;
    element.textContent = text;
    article.append(element);
    return element;
  };
  const who = part("h3", "who", title);
  const message = { article, who, text: part("div", "text"), note: role === "user" ? null : part("p", "note"), part };
  log.append(article);
  return message;
}

// Follow the text, unless the reader has scrolled up.
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

const fields = [byId("temperature"), byId("max-tokens")];

function setting(id) {
  const field = byId(id);
  return field.value === "" ? undefined : Number(field.value);
}

// Whether the settings can be sent; a wrong one is shown with what is wrong.
function settingsHold() {
  const wrong = fields.find((field) => !field.checkValidity());
  const what = wrong && `${wrong.labels[0].textContent}: ${wrong.validationMessage}`;
  for (const field of fields) field.setAttribute("aria-invalid", field === wrong);
  byId("settings-error").textContent = what ?? "";
  if (wrong === undefined) return true;
  announce.textContent = what;
  byId("settings").open = true;
  wrong.focus();
  return false;
}

function call() {
  const common = {
    stream: true,
    stream_options: { include_usage: true },
    temperature: setting("temperature"),
    max_tokens: setting("max-tokens"),
  };
  common.model = server.model;
  if (server.chat) {
    const system = byId("system").value;
    const head = system === "" ? [] : [{ role: "system", content: system }];
    return ["v1/chat/completions", { ...common, messages: [...head, ...turns] }];
  }
  // The whole conversation as one text: what was written begins a line, what was answered goes on from it.
  const prompt = turns.map((t, i) => (t.role === "user" && i > 0 ? "\n" : "") + t.content).join("");
  const most = Math.max(1, Math.min(256, Math.floor(server.max_model_len / 4)));
  return ["v1/completions", { ...common, prompt, max_tokens: common.max_tokens ?? most }];
}

async function answer(message, signal) {
  if (server === null) meet(await (await request("page/hello.json", { signal })).json());
  message.who.textContent = server.chat ? "Model" : "Continued";
  const [path, body] = call();
  const began = performance.now();
  let content = "", first = null, usage = null, reason = null;
  try {
    const response = await request(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const { data } of events(response)) {
      usage = data.usage ?? usage;
      const choice = data.choices[0];
      if (choice === undefined) continue;
      const piece = choice.delta?.content ?? choice.text ?? "";
      reason = choice.finish_reason ?? reason;
      if (piece === "") continue;
      first ??= performance.now();
      content += piece;
      following(() => message.text.append(piece));
    }
    return { content, reason };
  } catch (error) {
    if (!signal.aborted) throw Object.assign(error, { content });
    return { content, reason: "stopped" };
  } finally {
    const seconds = (performance.now() - (first ?? began)) / 1000;
    const parts = [];
    if (reason === "length") parts.push("cut at the longest length");
    if (signal.aborted) parts.push("stopped");
    if (first !== null) parts.push(`first text after ${((first - began) / 1000).toFixed(2)}\u00a0s`);
    if (usage !== null) {
      parts.push(`${usage.completion_tokens} tokens`);
      if (usage.completion_tokens > 1 && seconds > 0) {
        parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`.replaceAll(" ", "\u00a0"));
      }
    }
    following(() => (message.note.textContent = parts.join(" · ")));
  }
}

async function submit() {
  const text = input.value;
  if (running !== null || text.trim() === "" || !settingsHold()) return;
  const mine = (running = new AbortController());
  input.value = "";
  turns.push({ role: "user", content: text });
  addMessage("user", "You").text.textContent = text;
  const message = addMessage("assistant busy", "Model");
  log.scrollTop = log.scrollHeight;
  send.disabled = true;
  stop.disabled = false;
  announce.textContent = "The model is answering.";
  try {
    const { content, reason } = await answer(message, mine.signal);
    if (running === mine) turns.push({ role: "assistant", content });
    announce.textContent = reason === "stopped" ? "Stopped." : `Answer: ${content}`;
  } catch (error) {
    const what = error instanceof ApiError ? error.message : "the connection to the server was lost";
    following(() => message.part("p", "error", `Error: ${what}`));
    announce.textContent = `Error: ${what}`;
    if (running === mine) {
      if (error.content) turns.push({ role: "assistant", content: error.content });
      else turns.pop(); // it was not answered: here it is again, to be changed or sent once more
      if (!error.content && input.value === "") input.value = text;
    }
  } finally {
    message.article.classList.remove("busy");
    if (running === mine) settle();
  }
}

function settle() {
  running = null;
  send.disabled = false;
  const focused = document.activeElement === stop;
  stop.disabled = true;
  if (focused) input.focus();
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (byId("settings").open) {
    byId("settings").open = false;
    byId("settings").querySelector("summary").focus();
  } else running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  if (running !== null) settle();
  turns = [];
  for (const article of log.querySelectorAll(".message")) article.remove();
  empty.hidden = false;
  input.focus();
});
