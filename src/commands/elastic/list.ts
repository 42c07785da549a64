/** `mimo elastic list`: lists the submodels of an elastic checkpoint, a line for every budget and every file of --choice. */
import { defineCommand } from "citty";
import { openSource, requireFormat } from "../../checkpoint/index.ts";
import { countLayers } from "../../config/hybrid-pattern.ts";
import { axisNames, layerKind } from "../../guests/elastic/axes.ts";
import { parentSizes, type Sizes } from "../../guests/elastic/counts.ts";
import { memoryOf, memoryProfiles } from "../../guests/elastic/memory.ts";
import { readChoice } from "../../guests/elastic/submodel/choice.ts";
import { parentOf } from "../../guests/elastic/submodel/extract.ts";
import { recordOf, routerOf, sizesOfBudget } from "../../guests/elastic/submodel/family.ts";
import type { Submodel } from "../../guests/elastic/submodel/submodel.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { columns, print } from "../../observe/output.ts";
import type { BudgetRecord } from "../../observe/run-log/family.ts";
import { readRunLog } from "../../observe/run-log/reader.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { type Arguments, list as listOf, text } from "../arguments.ts";

const args = {
	load: {
		type: "string",
		valueHint: "CHECKPOINT",
		description: "The parent: a native, Hugging Face or torch_dist checkpoint.",
	},
	choice: {
		type: "string",
		valueHint: "FILE",
		description: "Files with sizes as for extract, separated by commas: a line each.",
	},
	log: { type: "string", valueHint: "LOG", description: "JSON log of the training, for the losses that it measured." },
	json: { type: "boolean", description: "Print the lines as JSON." },
} as const;

interface Row extends Omit<BudgetRecord, "budget"> {
	readonly name: string;
	/** GB that generating one sequence takes, in bf16. */
	readonly memory: number;
}

/** The input for which memory is computed: one sequence of 8192 tokens. */
const use = { profile: memoryProfiles.bf16, batchSize: 1, sequenceLength: 8192, prefillChunk: 8192 };

export default defineCommand({
	meta: { name: "list", description: "List the submodels of an elastic checkpoint: sizes, parameters, memory, loss." },
	args,
	run: async ({ args: given }) => {
		const parsed = given as unknown as Arguments;
		const load = text(parsed, "load");
		if (load === null) throw new UserError("--load is missing; it names the parent's checkpoint.", exitCodes.usage);
		const rows = rowsOf(load, listOf(parsed, "choice"), text(parsed, "log"));
		if (parsed.json) print(JSON.stringify(rows, null, "\t"));
		else for (const line of columns(tableOf(rows))) print(line);
	},
});

function rowsOf(load: string, files: readonly string[], log: string | null): Row[] {
	using source = openSource(load, requireFormat(load, null), {
		...{ optimizer: false, allowFallback: false, visionHeads: null, pattern: null, inert: [] },
		newLayers: { seed: 0, sizes: {} },
	});
	const { config: model } = parentOf(source);
	const row = (name: string, sizes: Sizes, loss: number | null): Row => {
		const axes = axisNames.filter((axis) => layerKind[axis] === null || model.pattern.includes(layerKind[axis]));
		const { budget: _, ...record } = recordOf(model, axes, sizes, { budget: 0, loss });
		const { value } = memoryOf(model, sizes, { ...use, profile: { ...use.profile, target: "total" } });
		return { name, ...record, memory: value };
	};
	const chosen = files.map((file) => row(file, sizesOfSubmodel(model, readChoice(file, model)), null));
	const elastic = source.model.flextron === true;
	if (!elastic && files.length > 0) return [row("parent", parentSizes(model), null), ...chosen];
	const router = routerOf(source, model);
	const losses = log === null ? null : readRunLog(log).family;
	const lossOf = (budget: number) => {
		const bin = losses?.get(budget)?.loss.bins.at(-1);
		return bin === undefined ? null : bin.sum / bin.count;
	};
	const budgets = router.config.budgets.map((budget) =>
		row(`budget ${budget}`, sizesOfBudget(router, model, budget), lossOf(budget)),
	);
	return [row("parent", parentSizes(model), null), ...budgets, ...chosen];
}

function sizesOfSubmodel(model: HybridConfig, submodel: Submodel): Sizes {
	const sizes = parentSizes(model);
	sizes.hidden = submodel.hiddenSize;
	for (const [layer, kind] of model.pattern.entries()) {
		const at = countLayers(model.pattern.slice(0, layer), kind);
		sizes.keep[layer] = submodel.keptLayers[layer] ? 1 : 0;
		if (kind === "mamba") sizes.mambaHeads[layer] = submodel.mambaNumHeads[at]!;
		if (kind === "attention") sizes.heads[layer] = submodel.numAttentionHeads[at]!;
		if (kind !== "moe") continue;
		sizes.experts[layer] = submodel.numMoeExperts[at]!;
		sizes.ffn[layer] = submodel.moeFfnHiddenSize[at]!;
	}
	return sizes;
}

function tableOf(rows: readonly Row[]): string[][] {
	const axes = Object.keys(rows[0]!.sizes);
	const size = (value: number) => (Number.isInteger(value) ? String(value) : value.toFixed(1));
	const millions = (value: number) => `${(value / 1e6).toFixed(2)} M`;
	return [
		["", ...axes, "parameters", "active", "memory", "loss"],
		...rows.map(({ name, sizes, total, active, memory, loss }) => [
			name,
			...axes.map((axis) => size(sizes[axis]!)),
			millions(total),
			millions(active),
			`${memory.toPrecision(3)} GB`,
			loss === null ? "" : loss.toFixed(4),
		]),
	];
}
