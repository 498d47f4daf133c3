"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const layout = {
  margin: {l: 56, r: 12, t: 26, b: 40}, font: {color: "#1c2733", size: 12}, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
  hovermode: "closest", legend: {orientation: "h", y: -0.22, yanchor: "top", x: 0, font: {size: 11}, traceorder: "normal"},
  xaxis: {automargin: true, title: {text: "step", standoff: 6}, gridcolor: "#eef1f5", zeroline: false},
  yaxis: {automargin: true, gridcolor: "#eef1f5", zerolinecolor: "#c3ccd6", exponentformat: "power"},
};
const config = {displaylogo: false, displayModeBar: "hover", responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

// charts are drawn when they come into view
const shows = kind => kind === "both" || document.getElementById(kind).checked;
const drawn = new Set();
const draw = place => {
  const figure = data.figures[place.dataset.figure];
  const axes = {xaxis: {...layout.xaxis, ...figure.layout.xaxis}, yaxis: {...layout.yaxis, ...figure.layout.yaxis}};
  figure.data.forEach(trace => { trace.visible = shows(trace.meta); });
  const named = new Set(figure.data.filter(trace => trace.name && trace.showlegend !== false).map(trace => trace.name)).size;
  place.style.height = `${290 + 17 * Math.max(0, Math.ceil(named / 2) - 2)}px`;  // a long legend takes none of the lines
  Plotly.newPlot(place, figure.data, {...layout, ...figure.layout, ...axes}, config);
  drawn.add(place);
};
const observer = new IntersectionObserver(entries => entries.forEach(entry => {
  if (entry.isIntersecting) { observer.unobserve(entry.target); draw(entry.target); }
}), {rootMargin: "400px"});
document.querySelectorAll(".plot").forEach(place => observer.observe(place));
for (const kind of ["raw", "smooth"]) {
  document.getElementById(kind).addEventListener("change", () => drawn.forEach(place =>
    Plotly.restyle(place, {visible: place.data.map(trace => shows(trace.meta))})));
}

// samples
const number = (given, digits) => given === null ? "not a number" : Number(given.toPrecision(digits));
const PAGE = 25;
let shown = PAGE;
const list = document.getElementById("samples"), count = document.getElementById("count");
const value = id => document.getElementById(id).value;
const bound = (id, otherwise) => value(id).trim() === "" ? otherwise : Number(value(id));
const response = sample => sample.response ?? sample.pieces.join("");
const texts = data.samples.map(sample => [sample.prompt, response(sample), sample.answer, sample.name].join("\n").toLowerCase());
const matches = () => {
  const text = value("text").toLowerCase(), run = value("run"), kind = value("kind"), end = value("end");
  const rewards = [bound("reward-from", -Infinity), bound("reward-to", Infinity)];
  const steps = [bound("step-from", -Infinity), bound("step-to", Infinity)];
  const found = data.samples.filter((sample, place) =>
    (run === "" || sample.run === Number(run)) && (kind === "" || sample.kind === kind) &&
    sample.reward >= rewards[0] && sample.reward <= rewards[1] && sample.step >= steps[0] && sample.step <= steps[1] &&
    (end === "" || (sample.finish === "length") === (end === "length")) && texts[place].includes(text));
  const orders = {
    best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward, longest: (a, b) => b.size - a.size,
    newest: (a, b) => b.step - a.step,
  };
  return orders[value("order")] ? found.sort(orders[value("order")]) : found;
};
const shade = logprob => {
  const doubt = Math.min(1, -logprob / 5);  // e^-5: less than 1 percent
  const stops = [[255, 255, 255], [246, 178, 107], [209, 73, 91]];
  const low = doubt < .5 ? 0 : 1, part = doubt * 2 - low;
  return `rgb(${stops[low].map((from, channel) => Math.round(from + part * (stops[low + 1][channel] - from))).join()})`;
};
const tokens = sample => {
  const box = element("pre", "tokens"), cut = sample.cut && sample.cut.length ? sample.cut : null;
  sample.pieces.forEach((piece, place) => {
    const position = cut && place >= cut[0] ? place + cut[1] - cut[0] : place;
    if (cut && place === cut[0]) box.append(element("b", "cut", ` … ${cut[1] - cut[0]} tokens are left out … `));
    const own = !sample.turns.length || sample.turns.some(([start, stop]) => position >= start && position < stop);
    const token = element("span", own ? "token" : "token other", piece === "" ? "·" : piece);
    const logprob = sample.logprobs[place];
    const told = logprob === null ? "log-prob not a number"
      : `log-prob ${number(logprob, 3)}, probability ${number(Math.exp(logprob), 2)}`;
    token.title = `token ${position}: ${own ? told : "of the environment"}`;
    if (own && logprob !== null) token.style.backgroundColor = shade(logprob);
    box.append(token);
  });
  return box;
};
const card = sample => {
  const box = element("div", "card sample"), head = element("div", "head");
  const facts = [["step", sample.step], ["reward", number(sample.reward, 4)],
    ["advantage", number(sample.advantage, 3)], ["tokens", sample.size], ["end", sample.finish],
    ["weights", sample.version], ["prompt", sample.name]];
  if (data.runs.length > 1) facts.unshift(["run", data.runs[sample.run]]);
  if (sample.kind !== "training") facts.push(["", sample.kind]);
  facts.forEach(([name, fact]) => { const item = element("span", "", name + " "); item.append(element("b", "", fact)); head.append(item); });
  if (sample.cut) head.append(element("span", "cut", "cut for this report"));
  const text = element("div", "text");  // a bdi each: text from right to left would mix with the other one
  text.append(element("bdi", "", sample.prompt.slice(-600)), " ⟶ ", element("bdi", "", response(sample).slice(0, 600)));
  box.append(head, text);
  head.addEventListener("click", () => {
    box.querySelectorAll(".detail").forEach(part => part.remove());
    if (!box.classList.toggle("open")) return;
    const detail = element("div", "detail");
    const part = (title, content) => detail.append(element("p", "note", title), content);
    part("prompt", element("pre", "", sample.prompt));
    if (sample.answer) part("reference answer", element("pre", "", sample.answer));
    part("response, each token shaded by its log-prob", tokens(sample));
    if (sample.response !== undefined) part("response as text", element("pre", "", sample.response));
    const rewards = {rewards: sample.rewards};
    if (Object.keys(sample.errors).length) rewards.errors = sample.errors;
    if (sample.outcome) rewards.outcome = sample.outcome;
    part("rewards", element("pre", "", JSON.stringify(rewards, null, 1)));
    box.append(detail);
  });
  return box;
};
const show = () => {
  const found = matches();
  count.textContent = `${found.length.toLocaleString("en")} of ${data.samples.length.toLocaleString("en")} samples`;
  list.replaceChildren(...found.slice(0, shown).map(card));
  if (found.length > shown) {
    const more = element("button", "", `show ${Math.min(PAGE, found.length - shown)} more`);
    more.addEventListener("click", () => { shown += PAGE; show(); });
    list.append(more);
  }
};
if (list) {
  const filters = document.querySelector(".filters");
  filters.addEventListener("input", () => { shown = PAGE; show(); });
  document.getElementById("reset").addEventListener("click", () => {
    filters.querySelectorAll("input, select").forEach(input => { input.value = ""; });
    shown = PAGE;
    show();
  });
  show();
}
