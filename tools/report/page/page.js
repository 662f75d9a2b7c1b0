// The script of the page that zero report writes: draws SVG from the data that html_page.cpp put next to it, and shows
// values under the pointer. It loads nothing and changes nothing but its charts; every number that matters is in a table
// as well. In three parts: what all charts share, curves and areas, bars and groups. The build puts this file into the
// program byte for byte (cmake/EmbedText.cmake).
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function svgElement(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function htmlElement(name, className, parent, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

// --- numbers ---
// Round values from lo to hi, about `count` of them.
function ticks(lo, hi, count) {
  if (!(hi > lo)) hi = lo + (Math.abs(lo) || 1);
  const raw = (hi - lo) / count, power = Math.pow(10, Math.floor(Math.log10(raw))), part = raw / power;
  const step = (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10) * power;
  const values = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; ++i) values.push(i * step);
  return {step, values};
}

function commas(text) { return text.replace(/\B(?=(\d{3})+(?!\d))/g, ","); }

// A tick's value with as many digits as the distance of ticks asks for.
function tickText(value, step) {
  const size = Math.abs(value), digits = d => Math.max(0, Math.min(8, -Math.floor(Math.log10(d) + 1e-9)));
  if (value === 0) return "0";
  if (size >= 1e6) return commas((value / 1e6).toFixed(digits(step / 1e6))) + "M";
  if (size >= 1e5) return commas((value / 1e3).toFixed(digits(step / 1e3))) + "k";
  if (size >= 1e3) return commas(value.toFixed(0));
  if (step >= 1e-3) return value.toFixed(digits(step));
  return value.toExponential(Math.max(0, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9)));
}

const units = [["B", 1], ["KiB", 1024], ["MiB", 1048576], ["GiB", 1073741824], ["TiB", 1099511627776]];
function unitOf(bytes) { return units.filter(u => bytes >= u[1]).pop() || units[0]; }
function sizeText(bytes) {
  const [name, one] = unitOf(bytes), value = bytes / one;
  return value.toFixed(one === 1 || value >= 100 ? 0 : value >= 10 ? 1 : 2) + " " + name;
}
function timeText(ms) {
  return ms >= 100 ? ms.toFixed(0) + " ms" : ms >= 1 ? ms.toFixed(2) + " ms" : (ms * 1000).toFixed(0) + " \u00b5s";
}
function figure(value) {
  if (value === null || value === undefined) return "\u2013";
  return Math.abs(value) >= 1000 ? commas(value.toFixed(0)) : String(Number(value.toPrecision(5)));
}
const sum = list => list.reduce((a, b) => a + b, 0);

// --- a chart: its box, its drawing, the note under the pointer ---
// draw(svg, width, note) is called again whenever the width changes.
const redraws = [];
function chart(id, height, draw) {
  const box = document.getElementById(id);
  if (!box) return;
  const noteBox = htmlElement("div", "tip", box);
  const note = {
    // Rows are [variable of a colour or "", text].
    show(x, title, rows) {
      noteBox.textContent = "";
      htmlElement("b", "", noteBox, title);
      for (const [color, text] of rows) {
        const row = htmlElement("div", "", noteBox);
        if (color) htmlElement("i", "", row).style.background = `var(--${color})`;
        row.append(text);
      }
      noteBox.style.visibility = "visible";
      const fits = x + 14 + noteBox.offsetWidth <= box.clientWidth;
      noteBox.style.left = (fits ? x + 14 : Math.max(0, x - 14 - noteBox.offsetWidth)) + "px";
      noteBox.style.top = "8px";
    },
    hide() { noteBox.style.visibility = "hidden"; },
  };
  const redraw = () => {
    const width = Math.max(280, Math.round(box.clientWidth || 600));
    const svg = svgElement("svg", {role: "img", "aria-label": box.dataset.title, width, height,
                                   viewBox: `0 0 ${width} ${height}`});
    draw(svg, width, note);
    const old = box.querySelector("svg");
    if (old) old.replaceWith(svg); else box.insertBefore(svg, noteBox);
  };
  redraw();
  redraws.push(redraw);
}

// Lines and numbers of a y axis from x0 to x1, its name above.
function yAxis(svg, x0, x1, place, lo, hi, name) {
  const {step, values} = ticks(lo, hi, 4);
  for (const value of values) {
    const y = Math.round(place(value)) + 0.5;
    svgElement("line", {class: "grid", x1: x0, x2: x1, y1: y, y2: y}, svg);
    svgElement("text", {x: x0 - 7, y: y + 4, "text-anchor": "end"}, svg, tickText(value, step));
  }
  svgElement("text", {x: 0, y: 11}, svg, name);
}

function xAxis(svg, x0, x1, y0, place, lo, hi, name) {
  const {step, values} = ticks(lo, hi, Math.max(2, Math.min(8, Math.floor((x1 - x0) / 80))));
  svgElement("line", {class: "axis", x1: x0, x2: x1, y1: y0 + 0.5, y2: y0 + 0.5}, svg);
  for (const value of values)
    svgElement("text", {x: place(value), y: y0 + 17, "text-anchor": "middle"}, svg, tickText(value, step));
  svgElement("text", {x: x1, y: y0 + 34, "text-anchor": "end"}, svg, name);
}

// A field that tells where the pointer is, in the drawing's own units.
function watch(svg, x, y, width, height, move, leave) {
  const field = svgElement("rect", {class: "hit", x, y, width: Math.max(0, width), height: Math.max(0, height)}, svg);
  field.addEventListener("pointermove", event => {
    const frame = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / frame.width;
    move((event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale);
  });
  field.addEventListener("pointerleave", leave);
}

// Dotted lines at the moments between the parts of a step, and the parts' names where they fit.
function stepParts(svg, part, place, y1, y0, lineTop) {
  for (const moment of part.marks)
    svgElement("line", {class: "mark", x1: place(moment), x2: place(moment), y1: lineTop, y2: y0}, svg);
  for (const {name, begin, end} of part.parts) {
    const fits = place(end) - place(begin) >= name.length * 6.6 + 4;
    if (fits) svgElement("text", {x: (place(begin) + place(end)) / 2, y: y1, "text-anchor": "middle"}, svg, name);
    else if (name === "step") svgElement("text", {x: place(end) + 8, y: y1, "text-anchor": "end"}, svg, name);
  }
}

// --- curves over steps; runs with the same numbers share a line ---
const sameList = (a, b) => a.length === b.length && a.every((value, i) => value === b[i]);

function sharedLines(key) {
  const lines = [];
  data.runs.forEach((run, index) => {
    const values = run[key], steps = run[key + "_steps"] || run.steps;
    if (!values || values.every(v => v === null)) return;
    const twin = lines.find(line => sameList(line.values, values) && sameList(line.steps, steps));
    if (twin) twin.runs.push(index); else lines.push({steps, values, runs: [index]});
  });
  return lines;
}

function tellShared(note, lines) {
  const shared = lines.filter(line => line.runs.length > 1);
  if (!note || !shared.length) return;
  const names = line => line.runs.map(i => data.runs[i].label).join(", ");
  note.textContent = lines.length === 1 && shared[0].runs.length === data.runs.length
    ? `All ${data.runs.length} runs have the same numbers at every step: one line.`
    : shared.map(names).join("; ") + ": the same numbers at every step, so one line.";
}

function curves(id, key, name, fromZero) {
  const lines = sharedLines(key);
  const remark = document.getElementById(id + "-note");
  if (!lines.length) {
    if (remark) remark.textContent = "No step has a value.";
    return;
  }
  tellShared(remark, lines);
  const known = lines.flatMap(line => line.values.filter(v => v !== null));
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
  let lo = known.reduce((a, b) => Math.min(a, b)), hi = known.reduce((a, b) => Math.max(a, b));
  if (fromZero) lo = Math.min(0, lo);
  const room = (hi - lo) * 0.05 || Math.abs(hi) * 0.1 || 1;
  hi += room;
  if (!fromZero) lo -= room;
  chart(id, 250, (svg, width, note) => {
    const x0 = 62, x1 = width - 14, y0 = 206, y1 = 24;
    const placeX = step => x0 + (step - first) / (last - first) * (x1 - x0);
    const placeY = value => y0 - (value - lo) / (hi - lo) * (y0 - y1);
    yAxis(svg, x0, x1, placeY, lo, hi, name);
    xAxis(svg, x0, x1, y0, placeX, first, last, "step");
    for (const line of [...lines].reverse()) {
      let path = "", drawing = false;
      line.values.forEach((value, i) => {
        if (value !== null)
          path += (drawing ? "L" : "M") + placeX(line.steps[i]).toFixed(1) + " " + placeY(value).toFixed(1);
        // A point without neighbours is a dot.
        if (value !== null && !drawing && (line.values[i + 1] ?? null) === null) path += "h0";
        drawing = value !== null;
      });
      const everyone = data.runs.length > 1 && line.runs.length === data.runs.length;
      const element = svgElement("path", {
        class: everyone ? "curve all" : "curve", d: path, "data-key": key, "data-points": line.values.length,
        "data-runs": line.runs.map(i => data.runs[i].label).join("|"), "data-last": line.values[line.values.length - 1],
      }, svg);
      if (!everyone) element.style.stroke = `var(--r${line.runs[0] % 8})`;
    }
    const cross = svgElement("line", {class: "cross", y1, y2: y0}, svg);
    watch(svg, x0, y1, x1 - x0, y0 - y1, x => {
      const at = first + (x - x0) / (x1 - x0) * (last - first);
      const near = steps.reduce((best, step) => Math.abs(step - at) < Math.abs(best - at) ? step : best);
      cross.setAttribute("x1", placeX(near));
      cross.setAttribute("x2", placeX(near));
      cross.style.visibility = "visible";
      const rows = [];
      for (const line of lines) {
        const i = line.steps.indexOf(near);
        for (const run of line.runs)
          if (i >= 0) rows.push([run, `r${run % 8}`, `${data.runs[run].label}  ${figure(line.values[i])}`]);
      }
      rows.sort((a, b) => a[0] - b[0]);
      note.show(placeX(near), "step " + near, rows.map(row => row.slice(1)));
    }, () => { cross.style.visibility = "hidden"; note.hide(); });
  });
}
curves("loss", "loss", data.loss_unit, false);
curves("throughput", "tokens_per_s", "tokens per second", true);
curves("lr", "lr", "learning rate", true);
curves("norm", "grad_norm", "gradient norm", true);
curves("scale", "loss_scale", "loss scale", true);
curves("heldout", "heldout_loss", data.loss_unit, false);
curves("load", "load_max", "busiest / mean", false);
curves("dropped", "dropped", "share of choices", true);

// --- experts of a layer: a row each, darker the more tokens chose it, from nothing to twice the mean ---
const shades = 8;
data.runs.forEach((run, index) => (run.experts || []).forEach(layer => {
  const experts = layer.load[0].length, rowHeight = Math.max(3, Math.min(20, Math.floor(240 / experts)));
  chart(`experts-${index}-${layer.block}`, experts * rowHeight + 66, (svg, width, note) => {
    const x0 = 62, x1 = width - 14, y1 = 20, y0 = y1 + experts * rowHeight;
    const first = layer.first[0], end = layer.last[layer.last.length - 1] + 1;
    const place = step => x0 + (step - first) / (end - first) * (x1 - x0);
    const cells = Array(shades + 1).fill("");
    layer.load.forEach((loads, i) => loads.forEach((load, e) => {
      const from = place(layer.first[i]), to = place(layer.last[i] + 1);
      cells[Math.min(shades, Math.round(load * shades / 2))] +=
        `M${from.toFixed(1)} ${y1 + e * rowHeight}H${to.toFixed(1)}v${rowHeight}H${from.toFixed(1)}z`;
    }));
    cells.forEach((d, shade) => {
      const cell = svgElement("path", {d, "data-shade": shade, "fill-opacity": shade / shades}, svg);
      cell.style.fill = "var(--r0)";
    });
    svgElement("rect", {class: "axis", x: x0, y: y1, width: x1 - x0, height: y0 - y1, fill: "none"}, svg);
    const {values} = ticks(0, experts - 1, Math.min(experts, 8));
    for (const e of values.filter(Number.isInteger))
      svgElement("text", {x: x0 - 7, y: y1 + (e + 0.5) * rowHeight + 4, "text-anchor": "end"}, svg, String(e));
    svgElement("text", {x: 0, y: 11}, svg, "expert");
    xAxis(svg, x0, x1, y0, place, first, end - 1, "step");
    watch(svg, x0, y1, x1 - x0, y0 - y1, (x, y) => {
      const step = Math.floor(first + (x - x0) / (x1 - x0) * (end - first)), e = Math.floor((y - y1) / rowHeight);
      const i = layer.last.findIndex(last => step <= last);
      if (i < 0 || e < 0 || e >= experts) return note.hide();
      note.show(x, `expert ${e}, steps ${layer.first[i]} to ${layer.last[i]}`,
                [["", `${figure(layer.load[i][e])} x the mean`]]);
    }, note.hide);
  });
}));

// --- bytes by purpose over the recorded step, on one scale for all runs ---
const highest = Math.max(1, ...data.runs.filter(run => run.area)
  .map(({area}) => Math.max(area.peak, ...area.bytes.map(sum))));

data.runs.forEach((run, index) => {
  const area = run.area;
  if (!area) return;
  chart("area-" + index, 250, (svg, width, note) => {
    const x0 = 62, x1 = width - 14, y0 = 206, y1 = 40, [unitName, unit] = unitOf(highest), hi = highest / unit * 1.04;
    const placeX = ms => x0 + Math.max(0, ms) / area.end * (x1 - x0);
    const placeY = bytes => y0 - bytes / unit / hi * (y0 - y1);
    for (const {name, begin, end} of area.parts)
      if (name === "backward")
        svgElement("rect", {class: "band", x: placeX(begin), width: placeX(end) - placeX(begin), y: y1,
                            height: y0 - y1}, svg);
    yAxis(svg, x0, x1, value => placeY(value * unit), 0, hi, unitName);
    xAxis(svg, x0, x1, y0, placeX, 0, area.end, "ms since the step began");
    const below = area.t.map(() => 0);
    data.purposes.forEach((purpose, p) => {
      if (area.bytes.every(bytes => bytes[p] === 0)) return;
      let upper = "", lower = "";  // a sample holds until the next one
      area.t.forEach((at, i) => {
        const from = placeX(at).toFixed(1), to = placeX(i + 1 < area.t.length ? area.t[i + 1] : area.end).toFixed(1);
        const floor = placeY(below[i]).toFixed(1), top = placeY(below[i] + area.bytes[i][p]).toFixed(1);
        upper += `${i ? "L" : "M"}${from} ${top}L${to} ${top}`;
        lower = `L${to} ${floor}L${from} ${floor}` + lower;
        below[i] += area.bytes[i][p];
      });
      svgElement("path", {d: upper + lower + "Z", "data-purpose": purpose}, svg).style.fill = `var(--p${p % 8})`;
    });
    const peak = Math.round(placeY(area.peak)) + 0.5;
    svgElement("line", {class: "peak", x1: x0, x2: x1, y1: peak, y2: peak, "data-peak": area.peak}, svg);
    svgElement("text", {class: "b", x: x1, y: 11, "text-anchor": "end"}, svg, "- - peak " + sizeText(area.peak));
    stepParts(svg, area, placeX, y1 - 7, y0, y1 - 4);
    const cross = svgElement("line", {class: "cross", y1, y2: y0}, svg);
    watch(svg, x0, y1, x1 - x0, y0 - y1, x => {
      const at = (x - x0) / (x1 - x0) * area.end, i = Math.max(0, area.t.filter(t => t <= at).length - 1);
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.style.visibility = "visible";
      const rows = data.purposes.map((purpose, p) => [`p${p % 8}`, `${purpose}  ${sizeText(area.bytes[i][p])}`]);
      note.show(x, `${timeText(Math.max(0, at))}: ${sizeText(sum(area.bytes[i]))}`,
                rows.filter((row, p) => area.bytes[i][p] > 0).reverse());
    }, () => { cross.style.visibility = "hidden"; note.hide(); });
  });
});

// --- stacked bars, one a run: {label, parts: [[colour, name, bytes]], peak, planned} ---
function bars(id, rows, what) {
  if (!rows.length) return;
  const height = rows.length * 30 + 62;
  const hi = Math.max(1, ...rows.map(row => Math.max(sum(row.parts.map(p => p[2])), row.peak || 0, row.planned || 0)));
  chart(id, height, (svg, width, note) => {
    const longest = Math.max(...rows.map(row => row.label.length));
    const x0 = Math.min(width * 0.45, longest * 7 + 16), x1 = width - 20, y1 = 8, y0 = height - 46;
    const [unitName, unit] = unitOf(hi), place = bytes => x0 + bytes / hi * (x1 - x0);
    xAxis(svg, x0, x1, y0, value => place(value * unit), 0, hi / unit, unitName + what);
    rows.forEach((row, i) => {
      const y = y1 + i * 30 + 5;
      svgElement("text", {class: "b", x: x0 - 8, y: y + 15, "text-anchor": "end"}, svg, row.label);
      let at = 0;
      for (const [color, name, bytes] of row.parts) {
        svgElement("rect", {x: place(at), y, width: place(at + bytes) - place(at), height: 20, "data-run": row.label,
                            "data-name": name, "data-value": bytes}, svg).style.fill = `var(--${color})`;
        at += bytes;
      }
      if (row.peak) {
        svgElement("path", {class: "peak", d: `M${place(at)} ${y + 10}H${place(row.peak)}`}, svg);
        svgElement("path", {class: "end", d: `M${place(row.peak)} ${y + 3}v14`}, svg);
      }
      if (row.planned)
        svgElement("path", {class: "planned", d: `M${place(row.planned)} ${y - 2}l5 12l-5 12l-5 -12z`}, svg);
      const told = row.parts.map(([color, name, bytes]) => [color, `${name}  ${sizeText(bytes)}`]);
      if (row.peak) told.push(["", "peak in the step  " + sizeText(row.peak)]);
      if (row.planned) told.push(["", "planned peak  " + sizeText(row.planned)]);
      watch(svg, x0, y - 4, x1 - x0, 28, x => note.show(x, `${row.label}: ${sizeText(at)}`, told), note.hide);
    });
  });
}
const atLeastOne = parts => parts.filter(part => part[2] > 0);
bars("rest", data.runs.filter(run => run.rest).map(run => ({
  label: run.label, peak: run.peak, planned: run.planned_peak,
  parts: atLeastOne(run.rest.map((bytes, p) => [`p${p % 8}`, data.purposes[p], bytes])),
})), "");
bars("wire", data.runs.filter(run => run.sent).map(run => ({
  label: run.label,
  parts: atLeastOne(run.sent.map((bytes, o) => [data.operation_colors[o], data.operations[o], bytes])),
})), " sent by one rank in one step");
bars("axes", data.runs.filter(run => run.axes).map(run => ({
  label: run.label,
  parts: atLeastOne(run.axes.map((bytes, a) => [data.axes[a][1], data.axes[a][0], bytes])),
})), " sent by rank 0 in one step");

// --- what became of every group in the recorded step; slices are [row, kind, begin, end, bytes, word] ---
const longestStep = Math.max(0, ...data.runs.map(run => run.groups ? run.groups.end : 0));
const words = {fwd: "forward", bwd: "backward", upd: "update", gat: "gather", red: "reduce", who: "whole"};

data.runs.forEach((run, index) => {
  const groups = run.groups;
  if (!groups) return;
  const rowHeight = groups.rows.length > 40 ? 12 : groups.rows.length > 16 ? 16 : 20;
  const height = groups.rows.length * rowHeight + 66;
  chart("groups-" + index, height, (svg, width, note) => {
    const longest = Math.max(...groups.rows.map(name => name.length));
    const x0 = Math.min(width * 0.35, longest * 6.9 + 14), x1 = width - 14, y1 = 18, y0 = height - 46;
    const place = ms => x0 + Math.min(Math.max(ms, 0), longestStep) / longestStep * (x1 - x0);
    groups.rows.forEach((name, i) => {
      const y = y1 + i * rowHeight;
      if (i % 2 === 0) svgElement("rect", {class: "band", x: x0, width: x1 - x0, y, height: rowHeight}, svg);
      svgElement("text", {class: "b", x: x0 - 8, y: y + rowHeight / 2 + 4, "text-anchor": "end"}, svg, name);
    });
    xAxis(svg, x0, x1, y0, place, 0, longestStep, "ms since the step began");
    stepParts(svg, groups, place, y1 - 6, y0, y1 - 4);
    const thin = Math.max(3, Math.round(rowHeight * 0.26));
    for (const [row, kind, begin, end] of groups.slices) {
      const y = y1 + row * rowHeight, whole = kind === "who" || kind === "wai";
      const moves = kind === "gat" || kind === "red" || kind === "tie";  // runs during compute: the narrow bars
      svgElement("rect", {
        x: place(begin), width: Math.max(0.8, place(end) - place(begin)), y: moves ? y + rowHeight - thin - 2 : y + 2,
        height: whole ? rowHeight - 4 : moves ? thin : rowHeight - thin - 5,
      }, svg).style.fill = `var(--${kind})`;
    }
    watch(svg, x0, y1, x1 - x0, y0 - y1, (x, y) => {
      const row = Math.floor((y - y1) / rowHeight), at = (x - x0) / (x1 - x0) * longestStep;
      const near = longestStep / (x1 - x0) * 2;
      if (row < 0 || row >= groups.rows.length) return note.hide();
      const under = groups.slices.filter(s => s[0] === row && s[2] <= at + near && s[3] >= at - near);
      note.show(x, `${groups.rows[row]} at ${timeText(Math.max(0, at))}`, under.map(s =>
        [s[1], `${s[5] || words[s[1]]}  ${timeText(s[3] - s[2])}${s[4] >= 0 ? "  " + sizeText(s[4]) : ""}`]));
    }, note.hide);
  });
});

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => redraws.forEach(redraw => redraw()), 80);
});
document.documentElement.dataset.drawn = "yes";
