// Requests to the gateway that served this page, and nobody else.

const KEY = "meshnet-api-key";

// A refusal: `code` is a name of the mesh's table of reasons.
export class Refusal extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }

  get wantsKey() {
    return this.code === "UNAUTHENTICATED";
  }
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// The answer to a request. Throws Refusal, and what fetch throws when nobody is there.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // A proxy in between answers in its own words.
  }
  throw new Refusal(error.code ?? `HTTP_${answer.status}`, error.message ?? answer.statusText);
}

// The data of the server-sent events of an answer. Throws Refusal for an event with an error, and Error for an answer that
// stops without having said that this is its end.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the answer stopped before its end");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refusal(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
