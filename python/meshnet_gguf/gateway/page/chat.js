// A conversation with a model, over the same API as everybody's. It lives in this page alone.

import { Refusal, events, request } from "./api.js";

// Text that grows by pieces and is put into the page once a frame, however fast they come.
class Growing {
  #node;
  #grown;
  #waiting = [];

  constructor(node, grown) {
    this.#node = node;
    this.#grown = grown;
  }

  add(piece) {
    if (this.#waiting.push(piece) === 1) requestAnimationFrame(() => this.flush());
  }

  flush() {
    if (!this.#waiting.length) return;
    const pieces = this.#waiting.splice(0).join("");
    this.#grown(() => this.#node.appendData(pieces));
  }
}

export class Chat {
  #messages = [];
  #running = null;
  #onKey;
  #part = (id) => document.getElementById(id);

  // `onKey` is called when the gateway asks for another key.
  constructor(onKey) {
    this.#onKey = onKey;
    const form = this.#part("chat-form");
    const message = this.#part("message");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(message.value);
    });
    message.addEventListener("keydown", (event) => {
      // Enter that ends a word of an input method is none.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running && message.value.trim()) form.requestSubmit();
    });
    this.#part("stop").addEventListener("click", () => this.#running?.abort());
    this.#part("clear").addEventListener("click", () => this.#clear());
  }

  offer(names) {
    const select = this.#part("model");
    const offered = Array.from(select.options, (option) => option.value);
    if (JSON.stringify(offered) !== JSON.stringify(names)) {
      const chosen = select.value;
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    }
    this.#part("model-choice").hidden = names.length < 2;
  }

  async #send(words) {
    if (this.#running || !words.trim()) return;
    const message = this.#part("message");
    this.#messages.push({ role: "user", content: words });
    this.#turn("user", "You").append(words);
    message.value = "";
    const running = new AbortController();
    this.#busy(running);
    const model = this.#part("model").value;
    const turn = this.#turn("assistant", model);
    const text = document.createTextNode("");
    turn.append(text);
    const growing = new Growing(text, (grow) => this.#follow(grow));
    try {
      const answer = await request("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ model, messages: this.#messages, stream: true }),
        signal: running.signal,
      });
      for await (const event of events(answer)) {
        const piece = event.choices?.[0]?.delta?.content;
        if (piece) growing.add(piece);
      }
    } catch (error) {
      growing.flush();
      this.#failed(turn, running, error);
    } finally {
      growing.flush();
      if (text.data) {
        this.#messages.push({ role: "assistant", content: text.data });
      } else {
        // A turn without an answer would be in the way of the next one.
        this.#messages.pop();
      }
      this.#busy(null);
      message.focus();
    }
  }

  #failed(turn, running, error) {
    const line = document.createElement("p");
    line.className = "failure";
    if (running.signal.aborted) {
      line.className = "empty";
      line.textContent = "Stopped.";
    } else if (error instanceof Refusal) {
      line.textContent = `${error.code}: ${error.message}`;
    } else {
      line.textContent = "The gateway does not answer.";
    }
    turn.append(line);
    this.#toEnd();
    if (error instanceof Refusal && error.wantsKey) this.#onKey(error);
  }

  // Does what makes the talk longer, and goes along to its end.
  #follow(grow) {
    const talk = this.#part("talk");
    // Whoever has scrolled up to read is left there.
    const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    grow();
    if (follows) this.#toEnd();
  }

  #turn(role, name) {
    this.#part("talk-none").hidden = true;
    this.#part("clear").hidden = false;
    const made = document.createElement("div");
    made.className = `turn ${role}`;
    const who = document.createElement("b");
    who.textContent = name;
    made.append(who);
    this.#part("talk").append(made);
    this.#toEnd();
    return made;
  }

  #toEnd() {
    const talk = this.#part("talk");
    talk.scrollTop = talk.scrollHeight;
  }

  #busy(running) {
    this.#running = running;
    this.#part("stop").hidden = !running;
    this.#part("send").disabled = Boolean(running);
    // Read out once it is whole, and not word by word.
    this.#part("talk").setAttribute("aria-busy", String(Boolean(running)));
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    for (const turn of this.#part("talk").querySelectorAll(".turn")) turn.remove();
    this.#part("talk-none").hidden = false;
    this.#part("clear").hidden = true;
    this.#part("message").focus();
  }
}

