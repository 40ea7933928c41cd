"use strict";
const at = (id) => document.getElementById(id);
const make = (name, text = "", properties = {}) => Object.assign(document.createElement(name), { textContent: text }, properties);
const PAUSE = 250; // milliseconds without typing before a text is translated
const ALTERNATIVES = 4;
let settings, sentences = [], chosen = [], selected = 0, running = new AbortController(), job = null, timer = 0;

const name = (code) => { try { return new Intl.DisplayNames("en", { type: "language" }).of(code); } catch { return code; } };
const pair = () => at("pair").value.split(" ");
const bare = (word) => word.replace(/^\u2581(?=.)/, "").replace("\u2581", "␣");

function show(error) {
  at("error").hidden = !error;
  at("error").textContent = error;
}

// Throws the server's error, or an AbortError if a newer request has replaced this one.
async function post(path, body, signal) {
  if (settings.keyRequired) {
    if (body instanceof FormData) body.append("api_key", at("key").value);
    else body.api_key = at("key").value;
  }
  const isForm = body instanceof FormData;
  const headers = isForm ? {} : { "content-type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: isForm ? body : JSON.stringify(body), signal });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error || `error ${response.status}`);
  return response;
}

async function translate() {
  running.abort();
  running = new AbortController();
  const { signal } = running, q = at("source").value, began = performance.now(), [source, target] = pair();
  at("count").textContent = q ? `${q.length} of ${settings.charLimit} characters` : "";
  let found = [];
  at("target").classList.add("stale");
  try {
    if (q.trim()) {
      const alternatives = Math.min(ALTERNATIVES, settings.alternativesLimit);
      const body = { q, source, target, alternatives, details: true, attention: at("map").open };
      found = (await (await post("translate", body, signal)).json()).sentences;
    }
    show("");
  } catch (error) {
    if (error.name === "AbortError") return;
    show(error.message);
  }
  at("target").classList.remove("stale");
  at("status").textContent = found.length ? `${Math.round(performance.now() - began)} ms` : "";
  sentences = found;
  chosen = found.map(() => 0);
  selected = Math.min(selected, Math.max(0, found.length - 1));
  if (found.length && !found[selected].text) selected = found.findIndex((each) => each.text);
  draw();
}

function draw() {
  at("target").replaceChildren(...sentences.flatMap((sentence, place) => {
    if (!sentence.text) return [sentence.before + sentence.after];
    const best = sentence.translations[chosen[place]];
    const button = make("button", best.text, { type: "button", className: "sentence" });
    button.onclick = () => { selected = place; draw(); at("target").querySelector("[aria-pressed=true]").focus(); };
    button.ariaPressed = String(place === selected);
    button.classList.toggle("marked", notes(sentence, best).length > 0);
    return [sentence.before, button, sentence.after];
  }));
  const sentence = sentences[selected];
  at("details").hidden = !sentence?.text;
  if (!sentence?.text) return;
  at("notes").replaceChildren(...notes(sentence, sentence.translations[chosen[selected]]).map((note) => make("li", note)));
  at("nbest").replaceChildren(...sentence.translations.map((translation, rank) => {
    const label = make("label"), input = make("input", "", { type: "radio", name: "nbest", checked: rank === chosen[selected] });
    input.onchange = () => { chosen[selected] = rank; draw(); at("nbest").querySelectorAll("input")[rank].focus(); };
    label.append(input, make("span", translation.text), make("output", translation.score.toFixed(2)));
    return label;
  }));
  drawMap(sentence);
}

function notes(sentence, translation) {
  const unknown = sentence.unknown.map((place) => bare(sentence.words[place]));
  return [
    unknown.length && `The model does not know: ${unknown.join(", ")}`,
    translation.unknown.length && "The translation has unknown words.",
    translation.lost.length && `Lost placeholders: ${translation.lost.join(", ")}`,
    sentence.cut && `The sentence is too long: its last ${sentence.cut} subwords are not translated.`,
  ].filter(Boolean);
}

function drawMap(sentence) {
  const { words, unknown, attention } = sentence.translations[chosen[selected]];
  at("layer-label").hidden = !attention || attention.length < 2;
  at("heat").replaceChildren();
  if (!attention) return;
  const layers = attention.length, before = at("layer").value;
  at("layer").replaceChildren(make("option", "mean", { value: "" }), ...attention.map((_, n) => make("option", n + 1, { value: n })));
  at("layer").value = before < layers ? before : "";
  const layer = at("layer").value;
  const value = (row, column) => layer === ""
    ? attention.reduce((sum, each) => sum + each[row][column], 0) / layers : attention[layer][row][column];
  const head = (word, scope, isUnknown) => make("th", bare(word), { scope, className: isUnknown ? "unknown" : "" });
  const top = make("tr");
  const source = [...sentence.words, "(end)"];
  top.append(make("td"), ...source.map((word, n) => head(word, "col", sentence.unknown.includes(n))));
  const rows = words.map((word, row) => {
    const line = make("tr");
    line.append(head(word, "row", unknown.includes(row)), ...source.map((_, column) => {
      const share = value(row, column), cell = make("td", Math.round(100 * share));
      cell.style.backgroundColor = `rgb(var(--heat) / ${Math.round(70 * share)}%)`;
      return cell;
    }));
    return line;
  });
  const thead = make("thead"), tbody = make("tbody");
  thead.append(top);
  tbody.append(...rows);
  at("heat").append(make("caption", "Attention of each translated word (rows) to each word of the text (columns), in percent"), thead, tbody);
}

async function translateFile(file) {
  job?.abort();
  job = new AbortController();
  const [source, target] = pair(), body = new FormData(), { signal } = job;
  for (const [field, value] of Object.entries({ source, target, progress: 1, file })) body.append(field, value);
  at("job-name").textContent = file.name;
  at("progress").removeAttribute("value");
  at("job").hidden = at("cancel").hidden = false;
  at("download").hidden = at("report").hidden = true;
  show("");
  try {
    const response = await post("translate_file", body, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", last = {};
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (text + part.value).split("\n");
      text = lines.pop();
      for (const line of lines) last = JSON.parse(line);
      if (last.total) Object.assign(at("progress"), { max: last.total, value: last.done });
    }
    if (!last.translatedFileUrl) throw new Error(last.error || "the server ended the translation without a result");
    Object.assign(at("progress"), { max: 1, value: 1 });
    at("download").href = new URL(last.translatedFileUrl).pathname.split("/").slice(-2).join("/");
    at("download").hidden = at("cancel").hidden = false;
    at("report").textContent = last.report;
    at("report").hidden = !last.report;
    at("download").focus();
  } catch (error) {
    if (job.signal !== signal) return; // the user dropped another file, which has the same controls
    at("job").hidden = true;
    if (error.name !== "AbortError") show(`${file.name}: ${error.message}`);
  }
  at("cancel").hidden = true;
}

function soon(pause = PAUSE) {
  clearTimeout(timer);
  timer = setTimeout(translate, pause);
}

async function start() {
  const [languages, told] = await Promise.all(["languages", "frontend/settings"].map(async (path) => (await fetch(path)).json()));
  settings = told;
  at("key-label").hidden = !settings.keyRequired;
  for (const { code, targets } of languages) {
    for (const target of targets) at("pair").append(make("option", `${name(code)} to ${name(target)}`, { value: `${code} ${target}` }));
  }
  at("source").oninput = () => soon();
  at("key").onchange = at("pair").onchange = () => soon(0);
  at("map").ontoggle = () => { if (at("map").open && !sentences[selected]?.translations[0].attention) soon(0); };
  at("layer").onchange = () => drawMap(sentences[selected]);
  at("copy").hidden = !navigator.clipboard; // undefined on a page that is neither encrypted nor local
  at("copy").onclick = async () => {
    await navigator.clipboard.writeText(at("target").textContent);
    at("status").textContent = "copied";
  };
  at("cancel").onclick = () => job.abort();
  at("file").onchange = () => { if (at("file").files[0]) translateFile(at("file").files[0]); at("file").value = ""; };
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("dropping"); };
  document.ondragleave = () => document.body.classList.remove("dropping");
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files[0]) translateFile(event.dataTransfer.files[0]);
  };
  if (at("source").value) soon(0);
}

start().catch((error) => show(`The server does not answer: ${error.message}`));
