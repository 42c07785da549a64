/** The submodels of an elastic run: the loss by size for every budget, and the router's choices over steps. */
import type { LoggedBudget } from "../run-log/family.ts";
import type { RunLog } from "../run-log/reader.ts";
import { largestOf, leastOf } from "../statistics.ts";
import { type Curve, frame, lineChart, ticks, x, y } from "./charts.ts";
import { runColours } from "./curves.ts";
import { type Html, html, nothing, numberText, section } from "./html.ts";

export function familySection({ family }: RunLog): Html {
	const budgets = [...family.values()].toSorted((a, b) => b.budget - a.budget);
	if (budgets.length === 0) return nothing;
	const axes = [...new Set(budgets.flatMap(({ sizes }) => [...sizes.keys()]))];
	const curvesOf = (pick: (one: LoggedBudget) => Curve["bins"] | undefined) =>
		budgets.map(
			(one, i): Curve => ({
				name: `budget ${one.budget}`,
				bins: pick(one) ?? [],
				colour: runColours[i % runColours.length]!,
				sparse: true,
			}),
		);
	const chart = (title: string, curves: readonly Curve[], { log = false } = {}) => {
		const drawn = lineChart(curves, { label: title, log });
		return drawn === null ? nothing : html`<h3>${title}</h3>${drawn}`;
	};
	// An axis of equal sizes is not drawn.
	const chosen = axes.filter((axis) => {
		const values = budgets.flatMap(({ sizes }) =>
			(sizes.get(axis)?.bins ?? []).flatMap(({ least, most }) => [least, most]),
		);
		return new Set(values).size > 1;
	});
	const choices = chosen.map((axis) =>
		chart(
			`${axis} by step`,
			curvesOf(({ sizes }) => sizes.get(axis)?.bins),
		),
	);
	const losses = chart(
		"loss of every budget by step",
		curvesOf(({ loss }) => loss.bins),
		{ log: true },
	);
	return section("Family of submodels", html`${table(budgets, axes)}${pareto(budgets)}${losses}${choices}`);
}

const latest = (one: LoggedBudget["loss"] | undefined): number => {
	const bin = one?.bins.at(-1);
	return bin === undefined ? Number.NaN : bin.sum / bin.count;
};

function table(budgets: readonly LoggedBudget[], axes: readonly string[]): Html {
	const heads = ["budget", "parameters", "active", "loss", ...axes];
	const rows = budgets.map((one) => {
		const cells = [
			one.budget,
			one.total,
			one.active,
			latest(one.loss),
			...axes.map((axis) => latest(one.sizes.get(axis))),
		];
		return html`<tr>${cells.map((cell) => html`<td class="number">${Number.isFinite(cell) ? numberText(cell) : ""}</td>`)}</tr>`;
	});
	const head = heads.map((name) => html`<th>${name}</th>`);
	return html`<div class="scroll"><table><tr>${head}</tr>${rows}</table></div>`;
}

/** The latest loss of every budget over its active parameters. */
function pareto(budgets: readonly LoggedBudget[]): Html {
	const points = budgets.flatMap((one, i) => {
		const loss = latest(one.loss);
		return Number.isFinite(loss) ? [{ ...one, loss, colour: runColours[i % runColours.length]! }] : [];
	});
	if (points.length === 0) return nothing;
	const actives = points.map(({ active }) => active);
	const losses = points.map(({ loss }) => loss);
	const across = ticks(0, largestOf(actives));
	const steps = { low: 0, high: across.at(-1)! };
	const levels = ticks(leastOf(losses), largestOf(losses));
	const scale = { low: levels[0]!, high: levels.at(-1)! };
	const place = ({ active, loss }: { active: number; loss: number }) => `${x(steps, active)} ${y(scale, loss)}`;
	const line = points
		.toSorted((a, b) => a.active - b.active)
		.map((point) => place(point).replace(" ", ","))
		.join(" ");
	const dots = points.map(
		(point) =>
			html`<path class="dot c${point.colour}" d="M${place(point)}h0"><title>budget ${point.budget}: ${numberText(point.active)} active parameters, loss ${numberText(point.loss)}</title></path>`,
	);
	const keys = points.map(({ budget, colour }) => html`<span class="key c${colour}">budget ${budget}</span>`);
	const label = "loss by active parameters";
	const drawing = frame(html`<polyline class="line c4 sparse" points="${line}"/>${dots}`, {
		...{ levels, scale, steps, unit: "", label, kind: "linear" },
	});
	return html`<h3>Loss by active parameters</h3><div class="curves"><div class="keys">${keys}</div>${drawing}</div>`;
}
