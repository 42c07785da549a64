/** The report of a run, or the comparison of several runs, as a self-contained HTML page. */
import { UserError } from "../../system/errors.ts";
import type { RunLog } from "../run-log/reader.ts";
import {
	type DrawnRun,
	learningRateSection,
	lossSection,
	normSection,
	runColours,
	stepTimeSection,
	throughputSection,
	timeSection,
} from "./curves.ts";
import { type Html, html, htmlPage, nothing, section } from "./html.ts";
import {
	configurationSection,
	evaluationSection,
	eventSection,
	expertSection,
	factsOf,
	familySection,
	head,
	memorySection,
	sampleSection,
	stateOf,
	topologySection,
} from "./sections.ts";

/** Most events that charts mark. */
const marked = 60;

/** The report of a run. `now`: milliseconds since 1970, from which the page knows whether the run is silent. */
export function reportPage(log: RunLog, now: number): string {
	const marks = log.events.filter(({ kind }) => kind !== "end").slice(-marked);
	const run: DrawnRun = { name: log.file, log };
	return page(log.file, [
		head(log, now),
		column([lossSection([run], marks), learningRateSection([run]), timeSection(run, marks)]),
		column([
			normSection([run], marks),
			throughputSection([run]),
			familySection(log),
			expertSection(log),
			memorySection(log),
			evaluationSection(log),
		]),
		sampleSection(log),
		eventSection(log),
		topologySection(log),
		configurationSection(log),
	]);
}

/** The comparison of several runs: curves in the same charts, and differences of their configurations. */
export function comparisonPage(logs: readonly RunLog[], now: number): string {
	if (logs.length > runColours.length) {
		throw new UserError(`At most ${runColours.length} runs can be compared, and ${logs.length} are given.`);
	}
	const names = distinctNames(logs.map(({ file }) => file));
	const runs = logs.map((log, i): DrawnRun => ({ name: names[i]!, log }));
	return page(names.join(", "), [
		compareHead(runs, now),
		column([lossSection(runs, []), learningRateSection(runs)]),
		column([normSection(runs, []), throughputSection(runs), stepTimeSection(runs)]),
		differencesSection(runs),
	]);
}

/** Paths without their common first folders and common last names. */
export function distinctNames(files: readonly string[]): string[] {
	const parts = files.map((file) => file.split("/"));
	const shared = (part: (list: readonly string[], i: number) => string | undefined) => {
		const shortest = Math.min(...parts.map(({ length }) => length));
		let count = 0;
		while (count < shortest - 1 && parts.every((list) => part(list, count) === part(parts[0]!, count))) count++;
		return count;
	};
	const first = shared((list, i) => list[i]);
	const last = Math.min(
		shared((list, i) => list.at(-1 - i)),
		...parts.map(({ length }) => length - first - 1),
	);
	const names = parts.map((list) => list.slice(first, list.length - last).join("/"));
	// A path that occurs twice gets its position in the list as a suffix.
	return names.map((name, i) => (names.indexOf(name) === i ? name : `${name} (${i + 1})`));
}

const column = (sections: readonly Html[]) => html`<div class="column">${sections}</div>`;

function page(title: string, sections: readonly Html[]): string {
	return htmlPage(title, { style, script: hoverScript, body: html`<main>${sections}</main>` });
}

// Sections of a page of several runs: their facts in columns, and the differences of their configurations.

function compareHead(runs: readonly DrawnRun[], now: number): Html {
	const facts = runs.map(({ log }) => new Map(factsOf(log, now)));
	const names = [...new Set(facts.flatMap((one) => [...one.keys()]))];
	const rows = runs.map(({ name, log }, i) => {
		const { text, kind } = stateOf(log, now);
		const cells = names.map((fact) => html`<td class="number">${facts[i]!.get(fact) ?? ""}</td>`);
		return html`<tr><td><span class="key c${runColours[i]!}">${name}</span></td><td><span class="state ${kind}">${text}</span></td>${cells}</tr>`;
	});
	const titles = names.map((name) => html`<th>${name}</th>`);
	return html`<header><h1>${runs.length} runs</h1><div class="scroll"><table class="runs"><tr><th>run</th><th></th>${titles}</tr>${rows}</table></div></header>`;
}

function differencesSection(runs: readonly DrawnRun[]): Html {
	const configurations = runs.map(({ log }) => (log.start?.configuration ?? {}) as Readonly<Record<string, unknown>>);
	const keys = [...new Set(configurations.flatMap((one) => Object.keys(one)))];
	const textOf = (value: unknown) => (value === undefined || value === null ? "" : String(value));
	const rows = keys.flatMap((key) => {
		const values = configurations.map((one) => textOf(one[key]));
		if (values.every((value) => value === values[0])) return [];
		return [html`<tr><td>${key}</td>${values.map((value) => html`<td>${value}</td>`)}</tr>`];
	});
	if (keys.length === 0) return nothing;
	const titles = runs.map(({ name }, i) => html`<th><span class="key c${runColours[i]!}">${name}</span></th>`);
	const table = html`<div class="scroll"><table><tr><th>key</th>${titles}</tr>${rows}</table></div>`;
	const none = html`<p>The configurations are equal.</p>`;
	return section("Configuration: what differs", rows.length === 0 ? none : table, { wide: true });
}

/** Style sheet of the report: one column on a phone, two on a wide screen; light or dark by the reader's preference. */
const style = `
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --soft: #5b6675; --rule: #dfe3e8;
  --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #7c3aed; --c4: #64748b; --c5: #db2777; --c6: #0891b2; --bad: #dc2626; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #9aa5b4;
  --rule: #2d3540; --c0: #6ea0ff; --c1: #f2a93b; --c2: #3fc58f; --c3: #b08cff; --c4: #8a97a8; --c5: #f472b6; --c6: #45c4dd; --bad: #ff6b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; display: grid; gap: 16px;
  grid-template-columns: repeat(2, minmax(0, 1fr)); }
header, section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px;
  min-width: 0; }
.column { display: flex; flex-direction: column; gap: 16px; min-width: 0; }
.wide, header { grid-column: 1 / -1; }
h1 { font-size: 21px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 6px; font-weight: 600; }
p { margin: 0 0 10px; color: var(--soft); }
.state { font-weight: 600; color: var(--c2); } .state.bad { color: var(--bad); } .state.quiet { color: var(--c1); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px 18px; margin: 14px 0 0; }
dl.facts dt { color: var(--soft); font-size: 13px; } dl.facts dd { margin: 0; font-size: 18px; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.chart { --height: 190px; display: grid; grid-template-columns: max-content minmax(0, 1fr); column-gap: 8px; }
/* A dot at the last step stands over the edge. */
.chart svg { width: 100%; height: var(--height); display: block; overflow: visible; clip-path: inset(0 -4px); }
/* Labels lie over each other, so that the widest makes the column, and move to their places. */
.levels { display: grid; height: 0; text-align: right; font-size: 12px; line-height: 16px; color: var(--soft);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.levels span { grid-area: 1 / 1; transform: translateY(calc(var(--height) * var(--at) - 8px)); }
.steps { grid-column: 2; position: relative; height: 18px; font-size: 12px; color: var(--soft); margin-top: 6px;
  font-variant-numeric: tabular-nums; }
.steps span { position: absolute; white-space: nowrap; left: calc(100% * var(--at)); transform: translateX(calc(-100% * var(--at))); }
.steps span:last-child::before { content: "step "; }
.curves { margin-bottom: 4px; }
.curves:has(.axis input:checked) .linear, .curves:not(:has(.axis input:checked)) .log { display: none; }
/* Alone it stands beside the title above. */
.keys:has(> .axis:only-child) { margin-top: -29px; }
:is(h2, h3):has(+ .curves > .keys > .axis:only-child) { padding-right: 90px; }
.axis { margin-left: auto; cursor: pointer; user-select: none; display: inline-flex; align-items: center; gap: 5px; }
.axis input { margin: 0; accent-color: var(--c0); }
.plot { position: relative; touch-action: pan-y; cursor: crosshair; }
.cross { position: absolute; top: 0; bottom: 0; left: calc(100% * var(--x, 0)); border-left: 1px solid var(--soft);
  visibility: hidden; pointer-events: none; }
.tip { position: absolute; z-index: 1; top: 4px; left: calc(100% * var(--x, 0) + 10px); visibility: hidden; pointer-events: none;
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 6px 10px; font-size: 12.5px;
  box-shadow: 0 3px 12px rgb(0 0 0 / .18); white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip div { display: flex; justify-content: space-between; gap: 16px; }
.plot.right .tip { left: auto; right: calc(100% * (1 - var(--x, 0)) + 10px); }
.plot.pointed .cross, .plot.pointed .tip { visibility: visible; }
svg .grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
svg .line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
svg .line.sparse { stroke-dasharray: 5 4; }
svg .dot { fill: none; stroke-width: 6; stroke-linecap: round; vector-effect: non-scaling-stroke; }
svg .band { opacity: .25; stroke: none; }
svg .mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
svg .mark.start, svg .mark.resume { stroke: var(--c2); } svg .mark.failure, svg .mark.not-finite, svg .mark.stop { stroke: var(--bad); }
${[0, 1, 2, 3, 4, 5, 6].map((i) => `.line.c${i}, .dot.c${i} { stroke: var(--c${i}); } .area.c${i}, .band.c${i} { fill: var(--c${i}); } .key.c${i}::before { background: var(--c${i}); }`).join("\n")}
.keys { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; color: var(--soft); margin-bottom: 14px; min-height: 4px; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.heat { display: grid; grid-template-columns: 76px minmax(0, 1fr); align-items: center; gap: 8px; font-size: 12px;
  color: var(--soft); } .heat svg { width: 100%; height: 20px; fill: var(--c0); display: block; margin: 1px 0; }
.bar { display: grid; grid-template-columns: minmax(86px, max-content) minmax(0, 1fr) max-content; gap: 10px; align-items: center;
  font-size: 13px; margin: 3px 0; font-variant-numeric: tabular-nums; }
.track { background: var(--page); border-radius: 4px; height: 14px; position: relative; }
.track div { background: var(--c4); opacity: .45; width: calc(100% * var(--at)); height: 100%; border-radius: 4px; position: absolute; }
.track div.inner { background: var(--c0); opacity: 1; }
.scroll { overflow-x: auto; max-height: 420px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } th { text-align: left; color: var(--soft); font-weight: 500; }
td, th { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; }
th { white-space: nowrap; } th.rest { width: 60%; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.modules { display: grid; grid-template-columns: minmax(0, 1fr) auto minmax(0, 2fr); gap: 14px; align-items: center; }
.modules.alone { grid-template-columns: minmax(0, 1fr); }
.module { border: 1px solid var(--rule); border-radius: 8px; padding: 10px; } .module > b { font-size: 13px; }
.lanes { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 8px; }
.lane { display: flex; gap: 2px; border: 1px solid var(--rule); border-radius: 6px; padding: 3px; }
.rank { background: var(--c1); color: #fff; border-radius: 4px; font-size: 11px; min-width: 22px; text-align: center; padding: 1px 3px; }
.rank.language { background: var(--c0); } @media (prefers-color-scheme: dark) { .rank { color: #0d1116; } }
.lanes.many .rank { min-width: 7px; height: 10px; padding: 0; font-size: 0; } .lanes.many .lane { padding: 1px; gap: 1px; }
.lanes.many { gap: 3px; }
.arrows { color: var(--soft); font-size: 13px; text-align: center; line-height: 1.7; }
.chart + p, .curves + p { margin: 8px 0 0; font-size: 14px; }
table.runs td { white-space: nowrap; overflow-wrap: normal; } table.runs .state { white-space: normal; display: inline-block; max-width: 40ch; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 14px; }
.samples figure { margin: 0; display: flex; gap: 12px; align-items: flex-start; border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px; font-size: 14px; min-width: 0; overflow-wrap: anywhere; }
.samples img { min-width: 96px; max-width: 112px; flex: none; image-rendering: pixelated; border-radius: 4px; } .samples figcaption { min-width: 0; }
.samples figcaption p { margin: 0 0 4px; max-height: 9em; overflow-y: auto; white-space: pre-wrap; }
.samples b { font-weight: 600; color: var(--text); } .samples .right b { color: var(--c2); } .samples .wrong b { color: var(--bad); }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
@media (max-width: 760px) { main { grid-template-columns: minmax(0, 1fr); padding: 10px 8px 32px; gap: 10px; }
  .column { gap: 10px; } header, section { padding: 14px 12px; } .modules { grid-template-columns: minmax(0, 1fr); }
  dl.facts { grid-template-columns: repeat(2, minmax(0, 1fr)); } .chart { --height: 160px; } .tip { left: auto; right: 0; }
  .plot.right .tip { left: 0; right: auto; }
  .events tr { display: grid; grid-template-columns: auto auto 1fr; } .events td, .events th { padding-right: 10px; }
  .events td { border-bottom: none; } .events td:nth-child(3) { grid-column: 1 / -1; order: 1; padding-top: 0;
  border-bottom: 1px solid var(--rule); } .events th:nth-child(3) { display: none; }
  .events td:nth-child(4), .events th:nth-child(4) { text-align: right; padding-right: 0; } }
`;

/**
 * The page's script, as text for the reader's browser: it shows a vertical line and the values of the step under the pointer. The
 * rest of the page works without it.
 */
const hoverScript = `
const numberText = (value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 5 : size < 100 ? 4 : 1 });
};
/* The last bin that begins at or before the step, or the next where that is nearer. */
const nearest = (first, step) => {
  let low = 0, high = first.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (first[middle] <= step) low = middle; else high = middle - 1;
  }
  return low + 1 < first.length && first[low + 1] - step < step - first[low] ? low + 1 : low;
};
const element = (parent, name, className, text) => {
  const made = parent.appendChild(document.createElement(name));
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
for (const box of document.querySelectorAll(".curves")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  for (const plot of box.querySelectorAll(".plot")) {
    const cross = element(plot, "div", "cross");
    const tip = element(plot, "div", "tip");
    const show = (share) => {
      const step = data.low + share * (data.high - data.low);
      const all = data.curves.map((curve) => ({ ...curve, at: nearest(curve.first, step) }));
      /* The curve with the nearest point says which step is meant. */
      const distance = ({ first, at }) => Math.abs(first[at] - step);
      const lead = all.reduce((best, one) => (distance(one) < distance(best) ? one : best));
      const [begin, end] = [lead.first[lead.at], lead.last ? lead.last[lead.at] : lead.first[lead.at]];
      tip.replaceChildren();
      element(tip, "b", "", (begin === end ? "step " : "steps ") + numberText(begin) + (begin === end ? "" : "–" + numberText(end)));
      let sum = 0;
      for (const { name, colour, first, mean, least, most, at } of all) {
        sum += mean[at];
        const row = element(tip, "div", "");
        /* A curve that is measured now and then says where. */
        const there = first[at] === begin || least ? "" : " at " + numberText(first[at]);
        element(row, "span", "key c" + colour, name + there);
        const range = least && least[at] < most[at] ? " (" + numberText(least[at]) + "–" + numberText(most[at]) + ")" : "";
        element(row, "span", "value", numberText(mean[at]) + data.unit + range);
      }
      if (data.stacked) {
        const row = element(tip, "div", "");
        element(row, "span", "", "together");
        element(row, "span", "value", numberText(sum) + data.unit);
      }
      const place = Math.min(1, Math.max(0, ((begin + end) / 2 - data.low) / (data.high - data.low)));
      plot.style.setProperty("--x", place);
      plot.classList.toggle("right", place > 0.5);
      plot.classList.add("pointed");
    };
    plot.addEventListener("pointermove", (event) => {
      const { left, width } = plot.getBoundingClientRect();
      show(Math.min(1, Math.max(0, (event.clientX - left) / width)));
    });
    plot.addEventListener("pointerleave", () => plot.classList.remove("pointed"));
  }
}
`;
