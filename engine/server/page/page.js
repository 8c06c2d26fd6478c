"use strict";

const at = (id) => document.getElementById(id);
let messages = [];  // of the conversation, as the protocol has them
let model = null, stopping = null;

// The protocol.

function headers() {
  const key = at("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function loadModel() {
  const response = await fetch("v1/models", {headers: headers()});
  at("key-label").hidden = response.status !== 401 && !at("key").value;
  if (!response.ok) return;
  model = (await response.json()).data[0];
  at("model").textContent = model.id;
  if (!at("cache").options.length) {
    at("cache").append(new Option("the server's", ""), ...model.engine.caches.map((name) => new Option(name, name)));
  }
  at("tokens").max = model.engine.max_tokens;
  at("tokens").value = Math.min(at("tokens").value, model.engine.max_tokens);
  at("beams").hidden = at("beams").disabled = model.engine.max_rows < 4;
}

function decoding() {
  const engine = at("cache").value ? {cache: at("cache").value} : {};
  switch (at("strategy").value) {
    case "sampling": return {temperature: 1, engine};
    case "beam": return {temperature: 0, engine: {...engine, num_beams: 4}};
    case "contrastive": return {temperature: 0, engine: {...engine, penalty_alpha: 0.6, top_k: 4}};
    case "prompt_lookup": return {temperature: 0, engine: {...engine, prompt_lookup_num_tokens: 10}};
    default: return {temperature: 0, engine};
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// The answer's usage, or null where it was stopped. seen: called with the text so far.
async function answer(talk, seen, signal) {
  if (!model) await loadModel();
  if (!model) throw new Error("the server asks for an API key, or does not answer");
  const body = {
    model: model.id, messages: talk, stream: true, stream_options: {include_usage: true},
    max_tokens: Number(at("tokens").value) || undefined, ...decoding(),
  };
  let text = "", usage = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const piece = event.choices[0]?.delta?.content;
      if (piece) seen(text += piece);
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    return null;
  }
  if (!text) throw new Error("the model ended its answer before the first word");
  return usage;
}

// The conversation.

let follows = true;  // false where the reader has scrolled up: new text then does not move the page

function follow() {
  if (follows) at("messages").scrollTop = at("messages").scrollHeight;
}

function show(kind, text) {
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  element.textContent = text;
  at("messages").append(element);
  follow();
  return element;
}

function inWords(usage, seconds) {
  return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, ` +
    `${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens were stored`;
}

function setBusy(controller) {
  stopping = controller;
  at("messages").ariaBusy = String(controller !== null);
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
  return controller;
}

// Messages that get no answer leave the history and return into the box: none of them is lost, and none is sent twice.
async function send(event) {
  event?.preventDefault();
  const content = at("message").value;
  if (!content.trim() || stopping) return;
  const talk = messages, start = performance.now(), {signal} = setBusy(new AbortController());
  talk.push({role: "user", content});
  at("message").value = "";
  at("message").focus();
  at("status").textContent = "The model answers.";
  follows = true;
  const asked = show("user", content), shown = show("assistant", "");
  let text = "", usage = null, failed = null;
  try {
    usage = await answer(talk, (begun) => { shown.textContent = text = begun; follow(); }, signal);
  } catch (error) {
    failed = error.message;
  }
  if (text) {
    talk.push({role: "assistant", content: text});
  } else {
    talk.pop();
    shown.remove();
    if (!failed) asked.remove();
    if (talk === messages) at("message").value = [content, at("message").value].filter(Boolean).join("\n");
  }
  if (usage) {
    const note = document.createElement("span");
    note.className = "note";
    note.textContent = inWords(usage, (performance.now() - start) / 1000);
    shown.append("\n", note);
    follow();
  }
  if (failed && talk === messages) show("error", failed);
  at("status").textContent = failed ?? (usage ? text : "Stopped.");
  setBusy(null);
}

at("form").addEventListener("submit", send);
at("message").addEventListener("keydown", (event) => {
  const composes = event.isComposing || event.keyCode === 229;  // Enter then ends the input method's word
  if (event.key === "Enter" && !event.shiftKey && !composes) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stopping?.abort();
});
at("stop").addEventListener("click", () => {
  stopping?.abort();
  at("message").focus();  // the button goes, and the focus would go with it
});
at("new").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  at("messages").replaceChildren();
  at("message").focus();
});
at("messages").addEventListener("scroll", () => {
  const {scrollHeight, scrollTop, clientHeight} = at("messages");
  follows = scrollHeight - scrollTop - clientHeight < 40;
});
new ResizeObserver(follow).observe(at("messages"));
at("key").addEventListener("change", loadModel);

// The pictures: read from /metrics twice a second.

const PLACES = {device: "#3b82f6", host: "#f59e0b", disk: "#10b981", staging: "#8b5cf6"};
const history = {rate: [], rows: [], hits: [], bytes: []};
const LENGTH = 120;
let before = null;

function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.match(/^kvengine_(\S+?)(?:\{(.*)\})? (\S+)$/);
    if (match) found[match[1] + (match[2] ? `{${match[2]}}` : "")] = Number(match[3]);
  }
  return found;
}

function inUnits(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

// layers: one list of values per color, drawn one on top of the other.
function draw(id, layers) {
  const canvas = at(id), context = canvas.getContext("2d");
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = canvas.clientHeight * devicePixelRatio;
  const sums = Array.from({length: LENGTH}, () => 0);
  const tops = layers.map(([color, values]) => {
    for (let i = 0; i < values.length; i++) sums[LENGTH - values.length + i] += values[i];
    return [color, [...sums]];
  });
  const most = Math.max(...sums, 1e-9) * 1.1;
  const x = (i) => i / (LENGTH - 1) * canvas.width, y = (value) => canvas.height * (1 - value / most);
  for (const [color, top] of tops.reverse()) {
    context.beginPath();
    context.moveTo(0, canvas.height);
    top.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.lineTo(canvas.width, canvas.height);
    context.fillStyle = color;
    context.fill();
  }
}

function keep(values, value) {
  values.push(value);
  if (values.length > LENGTH) values.shift();
}

async function look() {
  const response = await fetch("metrics", {headers: headers()});
  if (!response.ok) return;
  const now = parse(await response.text()), time = performance.now();
  if (before) {
    const rate = (now.generated_tokens_total - before.now.generated_tokens_total) / (time - before.time) * 1000;
    const bytes = Object.fromEntries(Object.keys(PLACES).map((one) => [one, now[`cache_bytes{place="${one}"}`] ?? 0]));
    keep(history.rate, rate);
    keep(history.rows, now.rows);
    keep(history.hits, now.cached_prompt_tokens_total);
    keep(history.bytes, bytes);
    const state = (name) => now[`requests_in_state{state="${name}"}`];
    at("rate").value = rate.toFixed(1);
    at("rows").value = now.rows;
    at("bytes").value = inUnits(Object.values(bytes).reduce((sum, one) => sum + one, 0));
    at("hits").value = `${now.cached_prompt_tokens_total} of ${now.prompt_tokens_total}`;
    at("places").textContent = Object.entries(bytes).filter(([, size]) => size)
      .map(([place, size]) => `${place} ${inUnits(size)}`).join(", ");
    at("queue").textContent = `${state("running")} prompts run, ${state("waiting")} wait, ${state("parked")} are parked; ` +
      `stored prefixes: ${inUnits(now.prefix_store_bytes)}; ${now.prefix_hits_total} prompts began with one.`;
    draw("rate-plot", [["#3b82f6", history.rate]]);
    draw("rows-plot", [["#3b82f6", history.rows]]);
    draw("hits-plot", [["#10b981", history.hits]]);
    draw("bytes-plot", Object.entries(PLACES).map(([one, color]) => [color, history.bytes.map((size) => size[one])]));
  }
  before = {now, time};
}

loadModel();
setInterval(() => look().catch(() => {}), 500);
