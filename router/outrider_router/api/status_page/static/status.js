// Draws the router's state, once a second. Names come from other processes: everything is set as
// text, nothing as HTML.
"use strict";

const KEPT = 120; // samples, one a second
const SPAN_S = 5; // rates and shares are of so long
const PERIOD_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";

const samples = [];
const curves = new Map();
let token = "";

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
const share = (part, whole) => (whole > 0 ? part / whole : null);

// The sample before the span that rates are of, or the oldest one.
function earlier() {
  const now = samples[samples.length - 1].time_s;
  return samples.findLast((sample) => sample.time_s <= now - SPAN_S) ?? samples[0];
}

// How much a sum grew; a sum that fell began anew.
function growth(now, before, name) {
  const grown = now[name] - (before?.[name] ?? now[name]);
  return grown < 0 ? now[name] : grown;
}

function figures() {
  const now = samples[samples.length - 1];
  const before = earlier();
  const seconds = now.time_s - before.time_s;
  const grown = (name) => growth(now.totals, before.totals, name);
  const rate = (name) => (seconds > 0 ? grown(name) / seconds : null);
  const drafted = grown("draft_tokens_total");
  const rounds = grown("rounds_total");
  const wait = share(grown("first_token_s_total"), grown("first_tokens_total"));
  return [
    { name: "Tokens", unit: "/s", value: rate("generation_tokens_total"), digits: 0 },
    { name: "Running", value: now.running, digits: 0, note: `${decimals(rate("requests_total"), 1)} ended a second` },
    { name: "Waiting", value: now.queued, digits: 0, note: `of at most ${now.queue_bound}` },
    { name: "Acceptance", value: share(grown("accepted_tokens_total"), drafted), percent: true, note: `${decimals(share(grown("accepted_tokens_total"), grown("drafts_total")), 2)} of a draft stand` },
    { name: "Tokens a round", value: share(grown("round_tokens_total"), rounds), digits: 2, note: `${percent(share(grown("fallback_rounds_total"), rounds))} without a draft` },
    { name: "First token", unit: "ms", value: wait === null ? null : 1000 * wait, digits: 0, note: "after a request came" },
    { name: "Errors", unit: "/s", value: rate("errors_total"), digits: 1, note: `${decimals(now.totals.errors_total, 0)} in all` },
    { name: "Failovers", value: now.totals.failovers_total, digits: 0, note: "since the start" },
  ];
}

// ---- drawing ---------------------------------------------------------------------------------

function spark(name, text) {
  const values = curves.get(name);
  const top = Math.max(...values.filter((value) => value !== null), 1e-9);
  const at = (value, place) => {
    const x = 100 - (values.length - 1 - place) * (100 / (KEPT - 1));
    return `${x.toFixed(2)} ${(32 - 29 * (value / top)).toFixed(2)}`;
  };
  const known = values.map((value, place) => [value, place]).filter(([value]) => value !== null);
  const points = known.map(([value, place]) => at(value, place));
  const drawing = shape("svg", {
    class: "spark", viewBox: "0 0 100 34", preserveAspectRatio: "none", role: "img", "aria-label": `${name} lately, now ${text}`,
  });
  if (points.length > 1) {
    const left = points[0].split(" ")[0];
    const right = points[points.length - 1].split(" ")[0];
    drawing.append(
      shape("path", { class: "area", d: `M ${left} 34 L ${points.join(" L ")} L ${right} 34 Z` }),
      shape("path", { d: `M ${points.join(" L ")}` }),
    );
  }
  return drawing;
}

function tile(figure) {
  const text = figure.percent ? percent(figure.value) : decimals(figure.value, figure.digits);
  const value = element("p", { class: "value", text });
  if (figure.unit && figure.value !== null) value.append(element("span", { class: "unit", text: figure.unit }));
  const note = element("p", { class: "note", text: figure.note ?? "" });
  const name = element("p", { class: "name", text: figure.name });
  return element("div", { class: "tile" }, name, value, note, spark(figure.name, `${text} ${figure.unit ?? ""}`.trim()));
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
  const before = earlier().verifiers.find((other) => other.address === verifier.address);
  const grown = (name) => growth(verifier.stats, before?.stats, name);
  const [state, kind] = stateOf(verifier);
  const used = verifier.kv_total_blocks - verifier.kv_free_blocks;
  const rounds = grown("rounds_total");
  const ahead = grown("look_ahead_rounds_total");
  const card = element("article", { class: "card" }, heading(verifier, state, kind, `${verifier.model} at ${verifier.address}`));
  if (!verifier.healthy) return card;
  card.append(
    meter("Sessions", verifier.sessions, verifier.max_sessions, `${verifier.sessions} / ${verifier.max_sessions}`),
    meter("KV blocks", used, verifier.kv_total_blocks, `${used} / ${verifier.kv_total_blocks}`),
    pipeline(verifier),
    facts([
      ["Acceptance", percent(share(grown("accepted_total"), grown("proposed_total")))],
      ["Tokens a round", decimals(share(grown("emitted_total"), rounds), 2)],
      ["Look-ahead hits", percent(share(grown("hit_rounds_total"), ahead))],
      ["Without a draft", percent(share(grown("fallback_rounds_total"), rounds))],
      ["Idle before a hit", verifier.hit_idle_us ? idle(verifier.hit_idle_us) : "–"],
      ["Preempted", decimals(verifier.preemptions_total, 0)],
      ["Without KV", decimals(verifier.waiting_sessions, 0)],
      ...(verifier.in_process_methods.length ? [["Drafts itself", verifier.in_process_methods.join(", ")]] : []),
    ]),
  );
  if (verifier.simulated_acceptance) {
    card.append(element("p", {}, badge(`simulated acceptance ${verifier.simulated_acceptance}`, "warn")));
  }
  if (verifier.planner) card.append(facts([["Planner", verifier.planner]], "whole"));
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

function draw() {
  const now = samples[samples.length - 1];
  const shown = figures();
  for (const figure of shown) {
    const values = curves.get(figure.name) ?? [];
    values.push(figure.value);
    curves.set(figure.name, values.slice(-KEPT));
  }
  byId("model").textContent = now.models.length ? now.models.join(", ") : "no healthy verifier";
  byId("version").textContent = `Outrider ${now.version}`;
  byId("tiles").replaceChildren(...shown.map(tile));
  const none = (what) => element("p", { class: "empty", text: `no ${what}` });
  const verifiers = now.verifiers.map(verifierCard);
  const drafters = now.drafters.map(drafterCard);
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
  }
}

async function look() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("status.json", { headers, cache: "no-store" });
  byId("login").hidden = answer.status !== 401 && answer.status !== 403;
  if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
  samples.push(await answer.json());
  if (samples.length > KEPT) samples.shift();
  draw();
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
