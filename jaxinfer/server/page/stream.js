// Requests to this server: the API key, errors as the API tells them, and server-sent events over fetch
// (an EventSource cannot send a header).

export const keyForm = document.getElementById("key-form");
const keyInput = document.getElementById("key");
const STORED = "jaxinfer-api-key"; // of this tab only

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// `path` is relative to the page, which may lie behind a prefix of a proxy's.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(STORED);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status says all
  }
  if (response.status === 401) askForKey();
  throw new ApiError(response.status, message, Number(response.headers.get("Retry-After")) || 0);
}

// Yields {event, data} until the stream ends; throws the error that the server sends as an event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        let event = "message";
        const data = [];
        for (const line of frame.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        const text = data.join("\n");
        if (text === "[DONE]") return;
        const parsed = JSON.parse(text);
        if (parsed.error) throw new ApiError(0, parsed.error.message, 0);
        yield { event, data: parsed };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function askForKey() {
  const known = sessionStorage.getItem(STORED) !== null;
  keyForm.querySelector("label").textContent = known ? "This API key is not valid" : "This server wants an API key";
  if (!keyForm.hidden) return;
  keyForm.hidden = false;
  keyInput.focus();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, keyInput.value);
  keyInput.value = "";
  keyForm.hidden = true;
  document.getElementById("input").focus();
  document.dispatchEvent(new Event("key"));
});
