// The page: asks for a key where one is demanded, follows the status, and shows it.

import { Refusal, events, hasKey, request, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { ModelViews, each, row, write } from "./models.js";
import { count, rate } from "./words.js";

const RETRY_SECONDS = [1, 2, 5, 10];
// A status comes every second; a gateway that sleeps breaks no connection.
const SILENT_SECONDS = 10;
const part = (id) => document.getElementById(id);
const views = new ModelViews(part("models"));
const chat = new Chat(askForKey);
let following = null;

function connection(words, live = false) {
  write(part("connection"), words);
  part("connection").classList.toggle("live", live);
}

function askForKey(refusal) {
  following?.abort();
  connection("Waiting for a key");
  part("page").hidden = true;
  part("to-chat").hidden = true;
  part("key-form").hidden = false;
  // The first time nobody has done anything wrong yet.
  write(part("key-failure"), hasKey() ? refusal.message : "");
  part("key").focus();
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(part("key").value);
  follow();
});

function showGateway(gateway, models) {
  const heads = models.map((model) => model.stages[0]?.work.decode_tokens_per_second ?? null);
  const known = heads.filter((value) => value !== null);
  write(part("rate"), rate(known.length ? known.reduce((sum, value) => sum + value, 0) : null));
  write(part("active"), `${count(gateway.active_slots)} of ${count(gateway.slots)}`);
  write(part("queued"), count(gateway.queued_requests));
  write(part("refused"), count(Object.values(gateway.refusals).reduce((sum, times) => sum + times, 0)));
}

function showRefusals(gateway, models) {
  const refusals = Object.entries(gateway.refusals).map(([reason, times]) => ({ reason, where: "gateway", times }));
  for (const model of models) {
    for (const stage of model.stages) {
      for (const [reason, times] of Object.entries(stage.refusals)) {
        refusals.push({ reason, where: stage.worker, times });
      }
    }
  }
  refusals.sort((a, b) => b.times - a.times || a.reason.localeCompare(b.reason));
  const table = part("refused-table");
  table.hidden = !refusals.length;
  part("refused-none").hidden = Boolean(refusals.length);
  each(table.tBodies[0], refusals, () => row(table), (made, { reason, where, times }) => {
    [reason, where, count(times)].forEach((words, index) => write(made.cells[index].firstElementChild, words));
  });
}

function show(status) {
  part("key-form").hidden = true;
  part("key").value = "";
  part("page").hidden = false;
  part("to-chat").hidden = false;
  showGateway(status.gateway, status.models);
  const news = views.show(status.models);
  if (news) write(part("news"), news);
  showRefusals(status.gateway, status.models);
  chat.offer(status.models.map((model) => model.name));
  const broken = status.models.filter((model) => model.problem).map((model) => model.name);
  const title = broken.length ? `${broken.join(", ")} is down – meshnet` : "meshnet";
  if (document.title !== title) document.title = title;
}

// Shows every status until another follow() begins or a key is wanted; a gateway that is away is tried again.
async function follow() {
  following?.abort();
  const mine = new AbortController();
  following = mine;
  for (let failures = 0; !mine.signal.aborted; failures += 1) {
    const attempt = new AbortController();
    const end = () => attempt.abort();
    mine.signal.addEventListener("abort", end);
    let silence = setTimeout(end, SILENT_SECONDS * 1000);
    try {
      const answer = await request("/status/events", { signal: attempt.signal });
      for await (const status of events(answer)) {
        if (mine.signal.aborted) return;
        clearTimeout(silence);
        silence = setTimeout(end, SILENT_SECONDS * 1000);
        failures = 0;
        connection("Live", true);
        try {
          show(status);
        } catch (error) {
          reportError(error); // a fault of this page, and none of the connection
        }
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refusal && error.wantsKey) {
        askForKey(error);
        return;
      }
    } finally {
      clearTimeout(silence);
      mine.signal.removeEventListener("abort", end);
    }
    if (mine.signal.aborted) return;
    connection("Connection lost, trying again");
    const wait = RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, wait * 1000));
  }
}

// Nobody is asked for what nobody sees.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    following?.abort();
    connection("Paused");
  } else if (part("key-form").hidden) {
    follow();
  }
});

follow();
