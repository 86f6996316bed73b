// Draws the router's state, once a second. Names come from other processes: everything is set as
// text, nothing as HTML. The router computes all figures.
"use strict";

const PERIOD_MS = 1000;
const HISTORY_PERIODS = 5; // the curves change slowly
const HISTORY_S = 900;
const MAX_PROBLEMS = 50; // shown
const SVG = "http://www.w3.org/2000/svg";
const SEVERITIES = { critical: "✕ Critical", warning: "▲ Warning", notice: "● Notice" };

let token = "";
let periods = 0;
let curves = { ages_s: [] };
let shownProblems = "";

const byId = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- figures ---------------------------------------------------------------------------------

function decimals(value, digits) {
  return value === null ? "–" : value.toLocaleString("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  });
}

const percent = (value) => (value === null ? "–" : `${decimals(100 * value, 0)} %`);
const idle = (us) => (us < 1000 ? `${decimals(us, 0)} µs` : `${decimals(us / 1000, 1)} ms`);
const rate = (value) => decimals(value, value !== null && value > 0 && value < 10 ? 1 : 0);

// Two digits, because times are estimated from histograms.
function time(ms) {
  if (ms === null) return "–";
  const [value, unit] = ms < 1000 ? [ms, "ms"] : [ms / 1000, "s"];
  const digits = value < 10 ? 1 : 0;
  return `${decimals(value >= 100 ? 10 * Math.round(value / 10) : value, digits)} ${unit}`;
}

function latency(name, key, about, state) {
  const median = state.figures[`${key}_ms_p50`];
  const tail = state.figures[`${key}_ms_p95`];
  return {
    name, text: time(median), format: time, about,
    note: median === null ? `none in the last ${minutes(state.window_s)}` : "",
    lines: [["median", `${key}_ms_p50`], [`95th percentile ${time(tail)}`, `${key}_ms_p95`]],
  };
}

function minutes(seconds) {
  const count = Math.round(seconds / 60);
  return count > 1 ? `${count} minutes` : "minute";
}

function figures(state) {
  const now = state.figures;
  const accepted = `${decimals(now.accepted_per_draft, 1)} of ${decimals(now.draft_tokens_per_draft, 1)} draft tokens`;
  return [
    latency("Time to first token", "time_to_first_token", "median", state),
    latency("Time per output token", "time_per_output_token", "median", state),
    { name: "Tokens", text: rate(now.tokens_per_s), unit: "/s", format: rate, note: "sent to clients", lines: [["tokens per second", "tokens_per_s"]] },
    {
      name: "Requests", text: decimals(state.running, 0), about: "running", format: rate,
      note: `${rate(now.requests_per_min)} ended a minute`,
      lines: [["running", "running"], [`${state.queued} waiting`, "waiting"]],
    },
    { name: "Acceptance", text: percent(now.acceptance), format: percent, note: now.acceptance === null ? "no drafts" : accepted, lines: [["accepted", "acceptance"]], top: 1 },
    { name: "Tokens a round", text: decimals(now.tokens_per_round, 2), format: (value) => decimals(value, 2), note: "1 without speculation", lines: [["tokens a round", "tokens_per_round"]] },
  ];
}

// ---- drawing ---------------------------------------------------------------------------------

// A line over the last minutes, broken where there is no value.
function line(values, top, kind) {
  let path = "";
  let isBroken = true;
  values.forEach((value, place) => {
    if (value === null) {
      isBroken = true;
      return;
    }
    const x = (300 * (1 - curves.ages_s[place] / HISTORY_S)).toFixed(1);
    const y = (57 - 54 * Math.min(1, value / top)).toFixed(1);
    // The short stroke before a value shows one that stands alone.
    path += isBroken ? `M ${(Number(x) - 3).toFixed(1)} ${y} L ${x} ${y}` : ` L ${x} ${y}`;
    isBroken = false;
  });
  return shape("path", { class: kind, d: path });
}

function spark(figure) {
  const drawing = shape("svg", {
    class: "spark", viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img",
  });
  const columns = figure.lines.map(([, key]) => curves[key] ?? []);
  const known = columns.flat().filter((value) => value !== null);
  const top = figure.top ?? Math.max(...known, 1e-9);
  const now = `${figure.text} ${figure.unit ?? ""}`.trim();
  const most = known.length ? `, at most ${figure.format(Math.max(...known))} in 15 minutes` : "";
  drawing.setAttribute("aria-label", `${figure.name} lately, now ${now}${most}`);
  columns.forEach((values, place) => {
    if (values.some((value) => value !== null)) drawing.append(line(values, top, place ? "second" : "first"));
  });
  const axis = element("p", { class: "axis", "aria-hidden": "true" },
    element("span", { text: "−15 min" }),
    element("span", { text: known.length ? `max ${figure.format(Math.max(...known))}` : "" }),
    element("span", { text: "now" }),
  );
  return element("div", { class: "curve" }, drawing, axis);
}

function key(figure) {
  if (figure.lines.length < 2) return [];
  const items = figure.lines.map(([name], place) =>
    element("span", {}, element("i", { class: place ? "dash" : "solid", "aria-hidden": "true" }), name));
  return [element("p", { class: "legend" }, ...items)];
}

function tile(figure) {
  const value = element("p", { class: "value", text: figure.text });
  const unit = figure.unit ?? figure.about;
  if (unit && figure.text !== "–") value.append(element("span", { class: "unit", text: unit }));
  const name = element("p", { class: "name", text: figure.name });
  const note = figure.note ? [element("p", { class: "note", text: figure.note })] : [];
  const words = element("div", {}, name, value, ...note, ...key(figure));
  return element("div", { class: "tile" }, words, spark(figure));
}

function problem(item) {
  const severity = element("span", { class: "severity", text: SEVERITIES[item.severity] });
  return element("li", { class: `problem ${item.severity in SEVERITIES ? item.severity : "warning"}` },
    element("h3", {}, severity, item.title),
    element("p", { text: item.detail }),
    element("p", { class: "advice" }, element("strong", { text: "What to do: " }), item.advice),
  );
}

// Drawn only if it changed, so that it can be read, selected and listened to.
function drawProblems(items) {
  const text = JSON.stringify(items);
  if (text === shownProblems) return;
  shownProblems = text;
  const count = items.length === 1 ? "One thing needs" : `${items.length} things need`;
  const verdict = items.length ? `${count} attention.` : "Nothing is wrong.";
  const said = byId("verdict");
  if (said.textContent !== verdict) said.textContent = verdict;
  said.className = items.length ? "verdict" : "verdict fine";
  const rows = items.slice(0, MAX_PROBLEMS).map(problem);
  if (items.length > MAX_PROBLEMS) rows.push(element("li", { class: "problem", text: `and ${items.length - MAX_PROBLEMS} more` }));
  byId("problems").replaceChildren(...rows);
}

function sentences(texts) {
  return element("ul", { class: "sentences" }, ...texts.map((text) => element("li", { text })));
}

function badge(text, kind) {
  return element("span", { class: `badge ${kind}`, text });
}

function meter(name, used, of, text) {
  const part = of > 0 ? Math.min(1, used / of) : 0;
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const kind = part > 0.9 ? "fill warn" : "fill";
  const fill = shape("rect", { class: kind, width: (100 * part).toFixed(1), height: "1" });
  bar.append(shape("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none" }, fill));
  const number = element("span", { class: "number", text });
  return element("div", { class: "meter" }, element("span", { class: "muted", text: name }), bar, number);
}

function facts(pairs, kind = "") {
  const list = element("dl", { class: kind });
  for (const [name, value] of pairs) {
    list.append(element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  }
  return list;
}

// A round: the target's forward, what is neither forward nor draft, and the rest (drafts, waits).
function pipeline(verifier) {
  const { round_ms: round, forward_ms: forward, overhead_ms: overhead } = verifier;
  const whole = Math.max(round, forward + overhead, 1e-9);
  const label = `A round takes ${decimals(round, 1)} ms, ${decimals(forward, 1)} of them in the target`;
  const drawing = shape("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const cut = (100 * forward) / whole;
  drawing.append(
    shape("rect", { class: "fill", width: cut.toFixed(2), height: "1" }),
    shape("rect", { class: "fill second", x: cut.toFixed(2), width: ((100 * overhead) / whole).toFixed(2), height: "1" }),
  );
  const legend = element("p", { class: "legend" });
  for (const [kind, name, value] of [["forward", "target", forward], ["overhead", "overhead", overhead], ["whole", "round", round]]) {
    legend.append(element("span", {}, element("i", { class: kind, "aria-hidden": "true" }), `${name} ${decimals(value, 1)} ms`));
  }
  return element("div", { class: "pipeline" }, drawing, legend);
}

function heading(peer, state, kind, about) {
  const names = element("div", {}, element("h3", { text: peer.id }), element("p", { text: about }));
  return element("div", { class: "head" }, names, badge(state, kind));
}

function stateOf(peer) {
  if (!peer.healthy) return ["✕ away", "bad"];
  return peer.draining ? ["◌ draining", "warn"] : ["● serving", "good"];
}

function verifierCard(verifier) {
  const [state, kind] = stateOf(verifier);
  const used = verifier.kv_total_blocks - verifier.kv_free_blocks;
  const recent = verifier.recent;
  const model = verifier.model ? `${verifier.model} at ${verifier.address}` : verifier.address;
  const card = element("article", { class: "card" }, heading(verifier, state, kind, model));
  if (!verifier.healthy) return card;
  card.append(
    meter("Sessions", verifier.sessions, verifier.max_sessions, `${verifier.sessions} / ${verifier.max_sessions}`),
    meter("KV blocks", used, verifier.kv_total_blocks, `${used} / ${verifier.kv_total_blocks}`),
    pipeline(verifier),
    facts([
      ["Acceptance", percent(recent.acceptance)],
      ["Tokens a round", decimals(recent.tokens_per_round, 2)],
      ["Look-ahead hits", percent(recent.look_ahead_hits)],
      ["Without a draft", percent(recent.without_draft)],
      ["Idle before a hit", verifier.hit_idle_us ? idle(verifier.hit_idle_us) : "–"],
      ["Preempted", decimals(verifier.preemptions_total, 0)],
      ["Without KV", decimals(verifier.waiting_sessions, 0)],
      ...(verifier.in_process_methods.length ? [["Drafts itself", verifier.in_process_methods.join(", ")]] : []),
    ]),
  );
  if (verifier.simulated_acceptance) {
    card.append(element("p", {}, badge(`simulated acceptance ${verifier.simulated_acceptance}`, "warn")));
  }
  if (verifier.speculation.length) card.append(sentences(verifier.speculation));
  return card;
}

function linkRow(link) {
  const state = element("td", {}, badge(link.quarantine ? "quarantine" : "in use", link.quarantine ? "warn" : "good"));
  if (link.quarantine) {
    state.append(element("p", { class: "muted", text: `${link.quarantine}, tried in ${decimals(link.probe_in_s, 0)} s` }));
  }
  return element("tr", {},
    element("th", { scope: "row", text: link.verifier }),
    element("td", { text: String(link.sessions) }),
    element("td", { text: link.answer_ms ? `${decimals(link.answer_ms, 1)} ms` : "–" }),
    state,
  );
}

function drafterCard(drafter) {
  const [state, kind] = stateOf(drafter);
  const about = `${drafter.methods.join(", ") || "no method"} at ${drafter.address}`;
  const card = element("article", { class: "card" }, heading(drafter, state, kind, about));
  if (drafter.links.length) {
    const head = element("tr", {}, ...["Verifier", "Sessions", "Answers in", "State"].map((text) => element("th", { scope: "col", text })));
    card.append(element("table", {},
      element("caption", { text: "Links" }), element("thead", {}, head), element("tbody", {}, ...drafter.links.map(linkRow)),
    ));
  } else if (drafter.healthy) {
    card.append(element("p", { class: "empty", text: "attached to no healthy verifier" }));
  }
  if (drafter.handicap) card.append(element("p", {}, badge(`slowed down: ${drafter.handicap}`, "warn")));
  return card;
}

function draw(state) {
  byId("model").textContent = state.models.length ? state.models.join(", ") : "no healthy verifier";
  byId("version").textContent = `Outrider ${state.version}`;
  byId("window").textContent = minutes(state.window_s);
  drawProblems(state.problems);
  byId("tiles").replaceChildren(...figures(state).map(tile));
  byId("speculation").replaceChildren(sentences(state.speculation));
  const none = (what) => element("p", { class: "empty", text: `no ${what}` });
  const verifiers = state.verifiers.map(verifierCard);
  const drafters = state.drafters.map(drafterCard);
  byId("verifiers").replaceChildren(...(verifiers.length ? verifiers : [none("verifiers")]));
  byId("drafters").replaceChildren(...(drafters.length ? drafters : [none("drafters: sessions decode plainly, or verifiers draft themselves")]));
}

// ---- asking ----------------------------------------------------------------------------------

function say(text, kind) {
  const line = byId("connection");
  // Set only when it changes: it is read out.
  if (line.textContent !== text) {
    line.textContent = text;
    line.className = `badge ${kind}`;
    byId("main").classList.toggle("stale", kind === "bad");
  }
}

async function look() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const wantsCurves = periods % HISTORY_PERIODS === 0 || !curves.ages_s.length;
  const query = wantsCurves ? "?history=true" : "";
  const answer = await fetch(`status.json${query}`, { headers, cache: "no-store" });
  byId("login").hidden = answer.status !== 401 && answer.status !== 403;
  if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
  const state = await answer.json();
  curves = state.history ?? curves;
  periods += 1;
  draw(state);
}

async function run() {
  try {
    if (!document.hidden) await look();
    say("live", "good");
  } catch (problem) {
    say(problem instanceof TypeError ? "the router does not answer" : problem.message, "bad");
  }
  setTimeout(run, PERIOD_MS);
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value; // for as long as the page is open
});
run();
