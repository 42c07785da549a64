/** `mimo trace summary`: sums the time of traced steps by part, operation, layer and collective. */
import { defineCommand } from "citty";
import { bytesText, columns, print } from "../observe/output.ts";
import { type GpuTime, type ModuleSummary, readTrace, summariseTrace, type Total } from "../observe/trace/summary.ts";
import { counted } from "../system/counted.ts";

/** Most rows of a table. */
const shown = 10;

const summary = defineCommand({
	meta: { name: "summary", description: "Sum the time of traced steps by part, operation, layer and collective." },
	args: {
		file: { type: "positional", description: "A trace (profile-file).", required: true },
		json: { type: "boolean", description: "Print one JSON object." },
	},
	run: ({ args }) => {
		const summary = summariseTrace(readTrace(args.file));
		if (args.json) {
			print(JSON.stringify(summary, null, 2));
			return;
		}
		const { steps, ranks, milliseconds, modules } = summary;
		print(`${counted(steps, "step")} of ${counted(ranks, "rank")}, ${milliseconds.toFixed(1)} ms.`);
		for (const module of modules) print(`\n${moduleText(module, steps)}`);
	},
});

export default defineCommand({
	meta: { name: "trace", description: "Summarise traces of training steps." },
	subCommands: { summary: async () => summary },
});

/** Milliseconds of one step of one rank, on average. */
function moduleText(module: ModuleSummary, steps: number): string {
	const whole = module.parts.reduce((sum, { milliseconds }) => sum + milliseconds, 0);
	const row = ({ name, calls, milliseconds, bytes }: Total) => [
		name === "" ? "(no layer)" : name,
		(calls / steps).toFixed(0),
		(milliseconds / steps).toFixed(2),
		`${((100 * milliseconds) / whole).toFixed(1)} %`,
		bytes > 0 ? bytesText(bytes / steps) : "",
	];
	const table = (title: string, totals: readonly Total[]) => {
		if (totals.length === 0) return [];
		const more = totals.length > shown ? [`${totals.length - shown} more`] : [];
		return [...columns([[title, "calls", "ms", "of a step", ""], ...totals.slice(0, shown).map(row)]), ...more, ""];
	};
	return [
		`# ${module.name}: ${counted(module.ranks, "rank")}, at most ${bytesText(module.peakBytes)} of device memory`,
		...table("part", module.parts),
		...table("operation", module.operations),
		...table("layer", module.scopes),
		...table("collective", module.collectives),
		...table("waited for", module.waits),
		module.gpu === null
			? `Between operations the host works ${(module.host / steps).toFixed(2)} ms of the passes.`
			: gpuText(module.gpu, steps),
	].join("\n");
}

function gpuText({ busy, launchGaps, waits }: GpuTime, steps: number): string {
	const share = (of: number) =>
		`${(of / steps).toFixed(2)} ms (${((100 * of) / (busy + launchGaps + waits)).toFixed(1)} %)`;
	return `The GPU works ${share(busy)} of a step, waits for the next launch ${share(launchGaps)}, for other ranks, data or the host ${share(waits)}.`;
}
