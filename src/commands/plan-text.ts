/** The text that `mimo plan` prints. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { bytesText, columns } from "../observe/output.ts";
import type { ModuleEstimate, StepEstimate } from "../plan/estimate.ts";
import type { LayoutFlags, LayoutKind } from "../plan/layout-candidates.ts";
import type { RankedSplits, Split } from "../plan/layout-search.ts";
import type { RankMemoryPlan } from "../plan/rank-plan.ts";
import type { Machine, ModulePlan, RunPlan } from "../plan/run-plan.ts";
import { counted } from "../system/counted.ts";

/** Splits that the table shows besides the best of each kind. */
const shown = 12;

/** "1.25 s", "31.4 ms". */
function secondsText(seconds: number): string {
	return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(1)} ms`;
}

const percent = (share: number) => `${(100 * share).toFixed(1)} %`;
const tera = (flops: number) => `${(flops / 1e12).toPrecision(4)} TFLOP`;

export function planText(plan: RunPlan, machine: Machine): string {
	return [
		`${counted(plan.worldSize, "rank")} on ${machine.rates.device}: ${counted(plan.microbatches, "microbatch", "microbatches")} and ${counted(plan.tokens, "token")} a step.`,
		"",
		"# Memory of a rank",
		...memoryTable(plan.modules, machine),
		...packedSentence(plan),
		...keptSentence(plan),
		"",
		"# Floating-point operations of a step",
		...flopsTable(plan),
		"",
		"# Bytes that a rank sends in a step",
		...trafficTable(plan.modules),
		"",
		"# Seconds of a step",
		...stepTable(plan.step, plan.microbatches),
		stepSentence(plan),
		boundSentence(plan, machine),
	].join("\n");
}

function memoryTable(modules: readonly ModulePlan[], { memoryBytes }: Machine): string[] {
	const row = (name: string, ranks: string, memory: RankMemoryPlan) => [
		name,
		ranks,
		bytesText(memory.parameters),
		bytesText(memory.gradients),
		bytesText(memory.optimizer),
		bytesText(memory.activations),
		bytesText(memory.peak),
		...(memoryBytes === null ? [] : [percent(memory.peak / memoryBytes)]),
	];
	const share = memoryBytes === null ? [] : [`of ${bytesText(memoryBytes)}`];
	return columns([
		["module", "ranks", "parameters", "gradients", "optimizer", "activations", "peak", ...share],
		...modules.flatMap(({ plan, firstRank, ranks, memory, recomputed, withoutAdapters }) => [
			row(plan.module, ranks === 1 ? `${firstRank}` : `${firstRank}-${firstRank + ranks - 1}`, memory),
			...(recomputed && recomputed !== memory ? [row("  layers recomputed", "", recomputed)] : []),
			...(withoutAdapters ? [row("  without adapters", "", withoutAdapters)] : []),
		]),
	]);
}

/** The sequences that the table is of, where they are packed with images. */
function packedSentence({ packedPatches }: RunPlan): string[] {
	if (packedPatches === null) return [];
	return [
		`Of packs full of images, ${packedPatches} patches a sequence (packing-max-patches allows fewer); times are of mock data.`,
	];
}

/** What --max-restarts with --non-persistent-save-interval takes. */
function keptSentence({ modules, keptInterval, keptSeconds, replicated }: RunPlan): string[] {
	if (keptInterval === null) return [];
	const each = modules.map(({ plan, memory }) => `${plan.module} ${bytesText(memory.kept)}`).join(", ");
	const often = keptInterval === 1 ? "after every step" : `every ${keptInterval} steps`;
	const kept = `In the host's memory, for restarts: two copies of a rank's state, one written ${often} in about ${secondsText(keptSeconds)}; bytes of each: ${each}.`;
	return replicated
		? [
				kept,
				"Another host keeps each copy too (replication): as many bytes again in its memory, sent when they are written.",
			]
		: [kept];
}

function flopsTable({ modules }: RunPlan): string[] {
	const total = modules.reduce((sum, { flops }) => sum + flops.forward + flops.backward, 0);
	return columns([
		["module", "forward", "backward", "share", "a rank"],
		...modules.map(({ plan, flops, ranks }) => [
			plan.module,
			tera(flops.forward),
			tera(flops.backward),
			percent((flops.forward + flops.backward) / total),
			tera((flops.forward + flops.backward) / ranks),
		]),
	]);
}

function trafficTable(modules: readonly ModulePlan[]): string[] {
	const rows = modules.flatMap(({ plan, traffic }) =>
		traffic.map(({ group, members, transfers, bytes, networkBytes, betweenHosts, seconds }) => [
			plan.module,
			group,
			`${members}`,
			betweenHosts ? "between hosts" : "in a host",
			`${transfers}`,
			bytesText(bytes),
			betweenHosts ? bytesText(networkBytes) : "",
			secondsText(seconds),
		]),
	);
	if (rows.length === 0) return ["nothing: one rank"];
	return columns([["of", "group", "ranks", "where", "transfers", "bytes", "of these to other hosts", "time"], ...rows]);
}

function stepTable({ modules, seconds }: StepEstimate, microbatches: number): string[] {
	const row = (one: ModuleEstimate) => [
		one.module,
		secondsText(microbatches * one.forward),
		secondsText(microbatches * one.backward),
		secondsText(one.wait),
		secondsText(one.gradients),
		secondsText(one.optimizer),
		percent(one.idle),
	];
	return [
		...columns([["module", "forward", "backward", "wait", "gradients", "optimizer", "idle"], ...modules.map(row)]),
		`step ${secondsText(seconds)}`,
	];
}

function stepSentence({ step, tokens, modules, worldSize }: RunPlan): string {
	const flops = modules.reduce((sum, one) => sum + one.flops.forward + one.flops.backward, 0);
	const rate = flops / step.seconds / worldSize / 1e12;
	const limit = step.limitedByCores ? " The ranks share the processor's cores, of which there are fewer." : "";
	return `${Math.round(tokens / step.seconds)} tokens/s, ${rate.toPrecision(3)} TFLOP/s a rank.${limit}`;
}

/** Such as "Bound by exchange between hosts: language computes 40 % of the step, …". */
function boundSentence({ bound, modules }: RunPlan, { memoryBytes }: Machine): string {
	const { plan, memory } = modules[bound.actor]!;
	const memorySentence = ` needs ${bytesText(memory.peak)} of ${bytesText(memoryBytes ?? 0)}, and`;
	const subject = `${plan.module}${bound.limit === "memory" ? memorySentence : ""}`;
	const encoder = plan.module.includes("+") ? ` (of this ${percent(bound.encoder)} in the encoder)` : "";
	const parts = [
		`computes ${percent(bound.computation)} of the step${encoder}`,
		`exchanges ${percent(bound.inHost)} in its host`,
		`${percent(bound.betweenHosts)} between hosts`,
		`waits ${percent(bound.waiting)}`,
	];
	return `Bound by ${bound.limit}: ${subject} ${parts.join(", ")}.`;
}

export function planJson(plan: RunPlan, machine: Machine): string {
	const modules = plan.modules.map(({ plan: { module }, ...rest }) => ({ module, ...rest }));
	return JSON.stringify({ ...plan, modules, device: machine.rates.device, memoryBytes: machine.memoryBytes }, null, 2);
}

export function splitsText({ splits, layouts }: RankedSplits, machine: Machine, c: TrainingConfiguration): string {
	const rest = layouts > splits.length ? `, the most promising of ${layouts}` : "";
	const rows = shownSplits(splits).map((split) => [
		`${splits.indexOf(split) + 1}`,
		kindText(split.kind),
		split.kind.modules === "disjoint" ? `${split.encoderRanks}:${split.languageRanks}` : `${split.languageRanks}`,
		`${Math.round(split.tokensPerSecond)}`,
		secondsText(split.step.seconds),
		idleText(split.step.modules),
		bytesText(split.peak),
		`${bytesText(split.communication.bytes)}, ${secondsText(split.communication.seconds)}`,
		split.bound.limit,
		layoutText(split.layout),
		split.reason,
	]);
	const header = ["", "kind", "ranks", "tokens/s", "step", "idle", "peak", "sent", "bound by", "layout", "why"];
	const patterns = new Map(
		shownSplits(splits)
			.filter(({ kind }) => kind.stages > 1)
			.map(({ kind, layout }) => [kind.stages * kind.virtualStages, layout["hybrid-layer-pattern"]]),
	);
	return [
		`Layouts on ${machine.rates.device}, global batch ${c.globalBatchSize}, ${splits.length} of them${rest}, most tokens a second first:`,
		...columns([header, ...rows]),
		...[...patterns].map(
			([segments, pattern]) => `${counted(segments, "segment")}: --hybrid-layer-pattern '${pattern}'`,
		),
		"Ranks: the encoder's and the language model's, or those that both share. Idle: of each module, or of every stage.",
		"Peak: of the rank that needs most. Sent: by the rank that sends most, in a step, and the time of its transfers.",
	].join("\n");
}

/** The best ones, and the best of each kind. */
function shownSplits(splits: readonly Split[]): readonly Split[] {
	const kind = ({ kind: { modules, stages, virtualStages } }: Split) => `${modules} ${stages > 1} ${virtualStages > 1}`;
	const best = Map.groupBy(splits, kind)
		.values()
		.map((all) => all[0]!);
	const wanted = new Set([...splits.slice(0, shown), ...best]);
	return splits.filter((split) => wanted.has(split));
}

/** Such as "colocated, 2 stages of 4 segments". */
function kindText({ modules, stages, virtualStages }: LayoutKind): string {
	if (stages === 1) return modules;
	return `${modules}, ${counted(stages, "stage")}${virtualStages === 1 ? "" : ` of ${counted(virtualStages, "segment")}`}`;
}

function idleText(modules: readonly ModuleEstimate[]): string {
	return `${modules.map(({ idle }) => (100 * idle).toFixed(0)).join(", ")} %`;
}

/** Without the pattern, which is long. */
function layoutText(layout: LayoutFlags): string {
	return Object.entries(layout)
		.filter(([key, value]) => key !== "hybrid-layer-pattern" && !(key === "llm-pp" && value === 1))
		.map(([key, value]) => `--${key} ${value}`)
		.join(" ");
}

export function splitsJson({ splits }: RankedSplits): string {
	return JSON.stringify(splits, null, 2);
}
