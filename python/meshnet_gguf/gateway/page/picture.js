// The route as a picture: a box for each stage, on its machine, and the seams between them.
//
//   const picture = new Picture(figure);
//   picture.show(model);    // as often as there is news
//
// It is drawn anew only when its shape changes. Otherwise texts and widths are set in place, so that nothing moves.

import { UNKNOWN, bytes, isBroken, layers, microseconds, rate, state } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const PAD = 14;
const BOX = { least: 208, most: 340, mostAlone: 720, height: 178 };
const GAP = { wide: 132, tall: 62 };
const BACK = 60; // what the way back takes at the edge
const BAR = 8;
const MESSAGE_LINES = 4;

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function text(x, y, className, anchor = "start") {
  return element("text", { x, y, class: className, "text-anchor": anchor });
}

function write(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

function widen(node, width) {
  const value = Math.max(0, width).toFixed(1);
  if (node.getAttribute("width") !== value) node.setAttribute("width", value);
}

// Cuts the words of a text so that they take no more than `width`.
function fit(node, words, width) {
  if (node.dataset.words === words) return;
  node.dataset.words = words;
  node.textContent = words;
  if (node.getComputedTextLength() <= width) return;
  const letters = Array.from(words);
  const cut = (length) => {
    node.textContent = `${letters.slice(0, length).join("").trimEnd()}…`;
    return node.getComputedTextLength() <= width;
  };
  let fitting = 1;
  for (let longer = letters.length; fitting < longer; ) {
    const middle = Math.ceil((fitting + longer) / 2);
    if (cut(middle)) fitting = middle;
    else longer = middle - 1;
  }
  cut(fitting);
}

// Words in lines of at most `width`, cut after the last of `nodes`.
function wrap(nodes, words, width) {
  if (nodes[0].dataset.all === words) return;
  nodes[0].dataset.all = words;
  let rest = words.split(/\s+/);
  nodes.forEach((node, index) => {
    let line = 0;
    if (index < nodes.length - 1) {
      while (line < rest.length) {
        node.textContent = rest.slice(0, line + 1).join(" ");
        if (node.getComputedTextLength() > width) break;
        line += 1;
      }
      line = Math.max(line, Math.min(1, rest.length));
    } else {
      line = rest.length;
    }
    fit(node, rest.slice(0, line).join(" "), width);
    rest = rest.slice(line);
  });
}

// The bytes that a stage uses, of those that there are.
function memoryOf(stage, scale) {
  const { weights_bytes, cache_bytes, cache_budget_bytes, resident_bytes, machine_bytes } = stage.memory;
  const weights = weights_bytes ?? 0;
  const cache = cache_bytes ?? 0;
  const used = resident_bytes ?? (weights_bytes == null ? null : weights + cache);
  const all = machine_bytes ?? scale;
  const share = (size) => Math.min(1, size / all);
  return {
    weights: share(weights),
    cache: share(weights + cache),
    program: share(Math.max(weights + cache, used ?? 0)),
    words: machine_bytes ? `${bytes(used)} of ${bytes(machine_bytes)}` : bytes(used),
    title:
      `weights ${bytes(weights_bytes)}, cache ${bytes(cache_bytes)} of at most ${bytes(cache_budget_bytes)}, ` +
      `process ${bytes(resident_bytes)}, machine ${bytes(machine_bytes)}`,
  };
}

class Box {
  constructor(stage, x, y, width, model) {
    this.inner = width - 2 * PAD;
    this.title = element("title");
    const left = x + PAD;
    const right = x + width - PAD;
    this.machine = text(left, y + 24, "strong");
    this.state = text(right, y + 24, `small ${stage.state}`, "end");
    this.worker = text(left, y + 42, "muted small");
    const share = this.inner / Math.max(1, model.layers);
    this.parts = [
      this.title,
      element("rect", { x, y, width, height: BOX.height, rx: 6, class: "box" }),
      this.machine,
      this.state,
      this.worker,
      this.#label(left, y + 66, layers(stage).replace(/^l/, "L")),
      this.#label(right, y + 66, `${stage.end - stage.begin} of ${model.layers}`, "muted", "end"),
      element("rect", { x: left, y: y + 72, width: this.inner, height: BAR, rx: 2, class: "track" }),
      element("rect", {
        x: left + stage.begin * share,
        y: y + 72,
        width: Math.max(2, (stage.end - stage.begin) * share),
        height: BAR,
        rx: 2,
        class: "layers",
      }),
    ];
    if (isBroken(stage)) {
      this.reason = text(left, y + 104, `small ${stage.state}`);
      this.message = Array.from({ length: MESSAGE_LINES }, (_, line) => text(left, y + 122 + line * 15, "small"));
      this.parts.push(this.reason, ...this.message);
    } else {
      this.used = text(right, y + 102, "muted", "end");
      // Each bar begins at the left, so that a longer one shows behind a shorter.
      const bar = (name) => element("rect", { x: left, y: y + 108, height: BAR, rx: 2, class: `${name} grows` });
      this.weights = bar("weights");
      this.cache = bar("cache");
      this.program = bar("program");
      this.figure = text(left, y + 162, "figure");
      this.sessions = text(right, y + 162, "figure", "end");
      this.parts.push(
        this.#label(left, y + 102, "Memory"),
        this.used,
        element("rect", { x: left, y: y + 108, width: this.inner, height: BAR, rx: 2, class: "track" }),
        this.program,
        this.cache,
        this.weights,
        this.#label(left, y + 140, "Tokens/s", "muted"),
        this.figure,
        this.#label(right, y + 140, "Sessions", "muted", "end"),
        this.sessions,
      );
    }
  }

  #label(x, y, words, className = "", anchor = "start") {
    const made = text(x, y, `small ${className}`, anchor);
    made.textContent = words;
    return made;
  }

  show(stage, scale) {
    const name = stage.machine || "nobody";
    write(this.state, state(stage.state));
    fit(this.machine, name, this.inner - this.state.getComputedTextLength() - 8);
    fit(this.worker, stage.endpoint, this.inner);
    if (isBroken(stage)) {
      fit(this.reason, stage.problem?.reason ?? "", this.inner);
      wrap(this.message, stage.problem?.message ?? "", this.inner);
      write(this.title, stage.problem?.message ?? "");
      return;
    }
    const memory = memoryOf(stage, scale);
    write(this.title, `${name} ${stage.worker} ${stage.endpoint}: ${memory.title}`);
    write(this.used, memory.words);
    widen(this.weights, memory.weights * this.inner);
    widen(this.cache, memory.cache * this.inner);
    widen(this.program, memory.program * this.inner);
    const { decode_tokens_per_second, open_sessions, max_sessions } = stage.work;
    write(this.figure, rate(decode_tokens_per_second));
    write(this.sessions, `${open_sessions ?? UNKNOWN} of ${max_sessions ?? UNKNOWN}`);
  }
}

function wordsOf(seam) {
  const known = seam.round_trip_us != null || seam.bytes_per_second != null;
  return {
    roundTrip: known ? microseconds(seam.round_trip_us) : "not measured",
    bandwidth: seam.bytes_per_second == null ? "" : `${bytes(seam.bytes_per_second)}/s`,
    now: seam.sent_bytes_per_second == null ? "" : `now ${bytes(seam.sent_bytes_per_second)}/s`,
    relay: seam.relay ? "relayed" : "",
  };
}

// A line with an arrow and up to four words at it.
class Link {
  constructor(path, tip, places, broken) {
    const mark = broken ? " broken" : "";
    this.words = places.map(({ x, y, anchor }) => text(x, y, "small muted", anchor));
    this.title = element("title");
    this.parts = [
      this.title,
      element("path", { d: path, class: `link${mark}` }),
      element("path", { d: tip, class: `tip${mark}` }),
      ...this.words,
    ];
  }

  show(words) {
    this.words.forEach((node, index) => write(node, words[index] ?? ""));
    write(this.title, words.filter(Boolean).join(", "));
  }
}

export class Picture {
  #figure;
  #shape = "";
  #boxes = [];
  #links = [];
  #back = null;
  #model = null;
  #svg = null;

  constructor(figure) {
    this.#figure = figure;
    new ResizeObserver(() => this.#model && this.show(this.#model)).observe(figure);
  }

  show(model) {
    this.#model = model;
    const width = Math.floor(this.#figure.clientWidth);
    if (!width) return;
    const shape = JSON.stringify([
      width,
      model.layers,
      model.stages.map((s) => [s.begin, s.end, s.state, s.worker, isBroken(s)]),
    ]);
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#draw(model, width);
    }
    const scale = Math.max(
      ...model.stages.map((s) => (s.memory.weights_bytes ?? 0) + (s.memory.cache_budget_bytes ?? 0)),
      1,
    );
    model.stages.forEach((stage, index) => this.#boxes[index].show(stage, scale));
    const seams = new Map(model.seams.map((seam) => [`${seam.source}-${seam.target}`, wordsOf(seam)]));
    this.#links.forEach((link, index) => {
      const words = seams.get(`${index}-${index + 1}`);
      if (words) link.show([words.roundTrip, words.bandwidth, words.now, words.relay]);
    });
    const back = seams.get(`${model.stages.length - 1}-0`);
    if (this.#back && back) {
      const measured = ["tokens back", back.roundTrip, back.bandwidth].filter(Boolean).join(" · ");
      this.#back.show([measured, back.now]);
    }
    this.#svg?.setAttribute("aria-label", describe(model));
  }

  #draw(model, width) {
    const stages = model.stages;
    const across = stages.length * BOX.least + (stages.length - 1) * GAP.wide <= width;
    this.#svg = element("svg", { role: "img" });
    // Texts are measured as they are written: what is not in the document has no lengths.
    this.#figure.replaceChildren(...(stages.length ? [this.#svg, legend()] : []));
    this.#boxes = [];
    this.#links = [];
    this.#back = null;
    const places = across ? this.#across(stages, width) : this.#down(stages, width);
    const { height, boxes, links, back } = places;
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    stages.forEach((stage, index) => {
      const { x, y, boxWidth } = boxes[index];
      const box = new Box(stage, x, y, boxWidth, model);
      this.#boxes.push(box);
      this.#svg.append(element("g", { class: isBroken(stage) ? "broken" : "" }, ...box.parts));
    });
    const broken = (index) => isBroken(stages[index]) || isBroken(stages[(index + 1) % stages.length]);
    links.forEach(({ path, tip, places: at }, index) => {
      const link = new Link(path, tip, at, broken(index));
      this.#links.push(link);
      this.#svg.append(element("g", {}, ...link.parts));
    });
    if (back) {
      this.#back = new Link(back.path, back.tip, back.places, broken(stages.length - 1));
      this.#back.parts[1].classList.add("back");
      this.#svg.append(element("g", {}, ...this.#back.parts));
    }
  }

  // Side by side, the way back below.
  #across(stages, width) {
    const count = stages.length;
    const boxWidth = Math.min(BOX.most, (width - 2 - (count - 1) * GAP.wide) / count);
    const boxes = stages.map((_, index) => ({ x: 1 + index * (boxWidth + GAP.wide), y: 1, boxWidth }));
    const middle = 1 + BOX.height / 2;
    const links = boxes.slice(1).map(({ x: end }) => {
      const begin = end - GAP.wide;
      const centre = (begin + end) / 2;
      return {
        path: `M${begin + 4} ${middle}H${end - 10}`,
        tip: `M${end - 4} ${middle}l-9 -5v10z`,
        places: [
          { x: centre, y: middle - 10, anchor: "middle" },
          { x: centre, y: middle + 20, anchor: "middle" },
          { x: centre, y: middle + 37, anchor: "middle" },
          { x: centre, y: middle - 27, anchor: "middle" },
        ],
      };
    });
    if (count < 2) return { height: BOX.height + 2, boxes, links, back: null };
    const bottom = BOX.height + 1;
    const first = boxes[0].x + boxWidth / 2;
    const last = boxes[count - 1].x + boxWidth / 2;
    return {
      height: BOX.height + 2 + BACK,
      boxes,
      links,
      back: {
        path: `M${last} ${bottom + 4}v10q0 8 -8 8H${first + 8}q-8 0 -8 -8v-2`,
        tip: `M${first} ${bottom + 3}l-5 9h10z`,
        places: [
          { x: (first + last) / 2, y: bottom + 38, anchor: "middle" },
          { x: (first + last) / 2, y: bottom + 54, anchor: "middle" },
        ],
      },
    };
  }

  // One under the other, the way back at the left edge.
  #down(stages, width) {
    const count = stages.length;
    const margin = count > 1 ? 22 : 1;
    const boxWidth = Math.min(BOX.mostAlone, width - margin - 1);
    const boxes = stages.map((_, index) => ({ x: margin, y: 1 + index * (BOX.height + GAP.tall), boxWidth }));
    const centre = margin + 28;
    const links = boxes.slice(1).map(({ y: end }) => {
      const begin = end - GAP.tall;
      return {
        path: `M${centre} ${begin + 4}V${end - 10}`,
        tip: `M${centre} ${end - 4}l-5 -9h10z`,
        places: [
          { x: centre + 16, y: begin + 27, anchor: "start" },
          { x: centre + 110, y: begin + 27, anchor: "start" },
          { x: centre + 16, y: begin + 45, anchor: "start" },
          { x: centre + 110, y: begin + 45, anchor: "start" },
        ],
      };
    });
    const height = count * BOX.height + (count - 1) * GAP.tall + 2;
    if (count < 2) return { height, boxes, links, back: null };
    const first = 1 + BOX.height / 2;
    const last = boxes[count - 1].y + BOX.height / 2;
    return {
      height: height + 40,
      boxes,
      links,
      back: {
        path: `M${margin - 4} ${last}h-6q-8 0 -8 -8V${first + 8}q0 -8 8 -8`,
        tip: `M${margin - 3} ${first}l-9 -5v10z`,
        places: [
          { x: margin, y: height + 16, anchor: "start" },
          { x: margin, y: height + 32, anchor: "start" },
        ],
      },
    };
  }
}

function legend() {
  const made = document.createElement("figcaption");
  made.className = "legend";
  for (const [name, words] of [["weights", "weights"], ["cache", "cache in use"], ["program", "rest of the process"]]) {
    const part = document.createElement("span");
    part.className = name;
    part.textContent = words;
    made.append(part);
  }
  return made;
}

// The picture in words; the table below it says the same in detail.
function describe(model) {
  const stages = model.stages.map((s) => `${layers(s)} on ${s.machine || "nobody"}, ${state(s.state)}`);
  return `The route of ${model.name}: ${stages.join("; ")}`;
}
