// What is shown of each model: its problem, the picture, its stages as a table, its lanes.

import { Picture } from "./picture.js";
import { UNKNOWN, bytes, count, isBroken, layers, rate, state } from "./words.js";

// Sets a text only when it is another one: what does not change is not read out again.
export function write(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

// Makes the children of `parent` as many as there are items, and fills each.
export function each(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, index) => fill(parent.children[index], item, index));
}

// A row of a table whose cells have the labels of its columns, for when it is shown as a card.
export function row(table) {
  const made = document.createElement("tr");
  for (const column of table.tHead.rows[0].cells) {
    const cell = made.insertCell();
    cell.className = column.className;
    cell.dataset.label = column.textContent;
    cell.append(document.createElement("span"));
  }
  return made;
}

function fillRow(made, words) {
  words.forEach((value, index) => write(made.cells[index].firstElementChild, value));
}

// A worker with its machine, unless the worker's own name says it.
function workerOn({ worker, machine }) {
  return worker.startsWith(machine) ? worker : `${worker} on ${machine}`;
}

function fillStage(made, stage) {
  const { work, memory } = stage;
  fillRow(made, [
    layers(stage).replace(/^layers? /, ""),
    workerOn(stage) || UNKNOWN,
    state(stage.state),
    rate(work.decode_tokens_per_second),
    rate(work.prefill_tokens_per_second),
    work.open_sessions == null ? UNKNOWN : `${work.open_sessions} of ${work.max_sessions ?? UNKNOWN}`,
    bytes(memory.weights_bytes),
    memory.cache_bytes == null ? UNKNOWN : `${bytes(memory.cache_bytes)} of ${bytes(memory.cache_budget_bytes)}`,
  ]);
  made.cells[1].firstElementChild.className = "name";
  made.cells[2].firstElementChild.className = `state ${stage.state}`;
}

const ADMISSIONS = {
  CERTIFIED: "Certified",
  DARK: "Dark, not used",
  DARK_ADMITTED: "Dark, but used",
};

function makeLane() {
  const made = document.createElement("li");
  const line = document.createElement("p");
  const tag = document.createElement("span");
  const why = document.createElement("span");
  why.className = "name why";
  line.append(tag, " ", why);
  const recipe = document.createElement("code");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  details.append(summary, document.createElement("ul"));
  made.append(line, recipe, details);
  return made;
}

function fillLane(made, lane) {
  const [tag, why] = made.firstElementChild.children;
  tag.className = `tag ${lane.admission}`;
  write(tag, ADMISSIONS[lane.admission] ?? lane.admission);
  write(why, lane.reason);
  const details = made.children[2];
  details.hidden = !lane.workers;
  if (!lane.workers) {
    const [head, tail] = [lane.head_fingerprint, lane.tail_fingerprint];
    write(made.children[1], `mixture of recipe ${head.slice(0, 16)} before ${tail.slice(0, 16)}`);
    return;
  }
  write(made.children[1], `recipe ${lane.fingerprint.slice(0, 16)}`);
  const workers = lane.workers.length + lane.unlisted_workers;
  write(details.firstElementChild, workers === 1 ? "1 worker" : `${count(workers)} workers`);
  each(details.lastElementChild, lane.workers, () => document.createElement("li"), (item, worker) => {
    const use = `${worker.open_sessions} of ${worker.max_sessions} sessions`;
    const why = worker.unroutable ? `; not used: ${worker.unroutable}` : "";
    write(item, `${layers(worker)}: ${workerOn(worker)}, ${use}${why}`);
    item.className = "name";
  });
}

class ModelView {
  constructor() {
    this.section = document.getElementById("model-template").content.firstElementChild.cloneNode(true);
    this.heading = this.section.querySelector("h2");
    this.summary = this.section.querySelector(".summary");
    this.problem = this.section.querySelector(".problem");
    this.stages = this.section.querySelector(".stages");
    this.lanes = this.section.querySelector(".lanes");
    this.picture = new Picture(this.section.querySelector(".picture"));
    this.said = null;
    // Where there is little room the picture has to do.
    this.section.querySelector(".detail").open = matchMedia("(min-width: 52.0625rem)").matches;
  }

  // Shows the model; what has happened to it since the last time, in words, or nothing.
  show(model) {
    write(this.heading, model.name);
    const machines = new Set(model.stages.map((stage) => stage.machine).filter(Boolean));
    const engines = new Set(model.stages.map((stage) => stage.engine).filter(Boolean));
    const parts = [
      `${count(model.layers)} layers`,
      `${count(model.stages.length)} ${model.stages.length === 1 ? "stage" : "stages"}`,
      `${count(machines.size)} ${machines.size === 1 ? "machine" : "machines"}`,
      ...Array.from(engines, (engine) => `engine ${engine}`),
    ];
    write(this.summary, parts.join(" · "));
    this.problem.hidden = !model.problem;
    const broken = model.stages.filter(isBroken);
    const cause = broken[0]?.problem ?? model.problem;
    write(this.problem.querySelector(".what"), this.#what(broken));
    write(this.problem.querySelector(".reason"), cause?.reason ?? "");
    write(this.problem.querySelector(".message"), cause?.message ?? "");
    this.picture.show(model);
    each(this.stages.tBodies[0], model.stages, () => row(this.stages), fillStage);
    const order = { DARK: 0, DARK_ADMITTED: 1, CERTIFIED: 2 };
    const lanes = [...model.lanes, ...model.mixtures].sort((a, b) => order[a.admission] - order[b.admission]);
    each(this.lanes, lanes, makeLane, fillLane);
    return this.#news(model, broken);
  }

  #what(broken) {
    if (!broken.length) return "This model cannot be used now.";
    const gone = broken.map((stage) => {
      const where = stage.machine ? ` on ${stage.machine}` : "";
      return `${layers(stage)}${where} (${state(stage.state).toLowerCase()})`;
    });
    return `This model cannot be used now, without ${gone.join(", ")}.`;
  }

  #news(model, broken) {
    const now = model.problem ? `${model.name}: ${this.#what(broken)}` : "";
    const before = this.said;
    this.said = now;
    if (before === null || before === now) return "";
    return now || `${model.name}: every stage is ready again`;
  }
}

export class ModelViews {
  #parent;
  #views = new Map();

  constructor(parent) {
    this.#parent = parent;
  }

  show(models) {
    const names = new Set(models.map((model) => model.name));
    for (const [name, view] of this.#views) {
      if (!names.has(name)) {
        view.section.remove();
        this.#views.delete(name);
      }
    }
    const news = models.map((model) => {
      if (!this.#views.has(model.name)) {
        const view = new ModelView();
        this.#views.set(model.name, view);
        this.#parent.append(view.section);
      }
      return this.#views.get(model.name).show(model);
    });
    return news.filter(Boolean).join(". ");
  }
}
