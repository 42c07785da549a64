/**
 * Megatron's flags whose meaning depends on other keys: ratios and numbers of layers become hybrid-layer-pattern, pipeline cuts become
 * | in it, and sizes that follow from others are compared with them. A layer is a symbol of the pattern, or a bracket group.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { readJsonText, tokenizerLimits } from "../system/json.ts";
import { PatternError, parsePattern } from "./hybrid-pattern.ts";
import type { PresetName } from "./keys/run.ts";
import type { Key } from "./schema.ts";
import type { Aside, Origin } from "./sources.ts";

type Raw = Readonly<Partial<Record<Key, unknown>>>;

/** Changes of the given values. */
export interface Rewriting {
	/** Values to set. */
	readonly values: readonly (readonly [Key, unknown, Origin])[];
	/** Keys whose values give way. */
	readonly dropped: readonly Key[];
	readonly notes: readonly string[];
}

/** A flag that cannot be rewritten; the message ends the sentence about it. */
export class RewriteError extends Error {
	constructor(
		readonly aside: Aside,
		message: string,
	) {
		super(message);
	}
}

/** The last of `asides` with one of these names. */
const lastOf = (asides: readonly Aside[], ...names: readonly string[]) =>
	asides.findLast(({ name }) => names.includes(name));

function numberOf(aside: Aside, least: number, most = Number.MAX_SAFE_INTEGER): number {
	const value = Number(aside.values[0]);
	const isWhole = most === 1 || Number.isSafeInteger(value);
	if (aside.values.length === 1 && isWhole && value >= least && value <= most) return value;
	throw new RewriteError(aside, most === 1 ? "allowed is a number from 0 to 1" : `allowed is an integer from ${least}`);
}

const wholeOf = (value: unknown, otherwise: number) => (Number.isSafeInteger(value) ? (value as number) : otherwise);

/** Rewrites the flags `asides` with the other values known. Throws a RewriteError for the first that cannot be. */
export function rewritten(asides: readonly Aside[], raw: Raw): Rewriting {
	const values: (readonly [Key, unknown, Origin])[] = [];
	const dropped: Key[] = [];
	const notes: string[] = [];
	const made = patternOf(asides, raw);
	const given = made?.pattern ?? raw["hybrid-layer-pattern"];
	if (made !== null) {
		notes.push(`${made.why}: hybrid-layer-pattern is ${made.pattern}.`);
		dropped.push("num-layers", "mtp-num-layers");
	}
	const cut = typeof given === "string" && isPattern(given) ? cutPattern(asides, raw, given) : null;
	if (cut !== null) notes.push(`--${cut.aside.name}: hybrid-layer-pattern is ${cut.pattern}.`);
	const source: Origin = (cut?.aside ?? made?.aside)?.origin ?? { source: "derived", from: "num-layers" };
	if (cut !== null || made !== null) values.push(["hybrid-layer-pattern", cut?.pattern ?? made!.pattern, source]);

	const microbatches = lastOf(asides, "num-microbatches");
	const replicas = wholeOf(raw["llm-dp"], 1);
	if (microbatches !== undefined) {
		const batch = numberOf(microbatches, 1) * wholeOf(raw["micro-batch-size"], 1) * replicas;
		const said = raw["global-batch-size"];
		if (said === undefined) values.push(["global-batch-size", batch, microbatches.origin]);
		else if (said !== batch)
			throw new RewriteError(
				microbatches,
				`of micro-batch-size and llm-dp it makes ${batch}, and global-batch-size is ${said}`,
			);
	}
	const expertReplicas = lastOf(asides, "llm-expt-dp");
	if (expertReplicas !== undefined) {
		const ranks = wholeOf(raw["llm-tp"], 1) * replicas;
		const follows = ranks / (wholeOf(raw["llm-ep"], 1) * wholeOf(raw["llm-expt-tp"], 1));
		if (numberOf(expertReplicas, 1) !== follows)
			throw new RewriteError(
				expertReplicas,
				`allowed is ${follows}, which follows from llm-tp, llm-dp, llm-ep and llm-expt-tp`,
			);
	}
	if (isPresetOfLoop(raw.preset)) {
		if (raw["train-samples"] !== undefined) dropped.push("train-iters");
		if (raw["lr-warmup-samples"] !== undefined) dropped.push("lr-warmup-iters");
		if (raw["lr-decay-samples"] !== undefined) dropped.push("lr-decay-iters");
		if (raw["dynamic-resolution"] === false) {
			const preset: Origin = { source: "preset", name: raw.preset };
			for (const key of ["use-tiling", "use-thumbnail"] as const)
				if (raw[key] === undefined) values.push([key, true, preset]);
		}
	}
	const image = lastOf(asides, "image-token");
	if (image !== undefined && raw["image-token-id"] === undefined) {
		values.push(["image-token-id", imageTokenId(image, raw.tokenizer), image.origin]);
	}
	return { values, dropped, notes };
}

/**
 * Whether a preset is a model provider of Megatron's MIMO loop, where numbers of samples win over numbers of steps, and images that
 * do not keep their size are cut into tiles with a thumbnail.
 */
const isPresetOfLoop = (preset: unknown): preset is PresetName =>
	typeof preset === "string" && preset.startsWith("nemotron-moe-vlm-");

function isPattern(text: string): boolean {
	try {
		parsePattern(text);
		return true;
	} catch (error) {
		// The check of hybrid-layer-pattern reports it.
		if (error instanceof PatternError) return false;
		throw error;
	}
}

/** The pattern that layers are described by without hybrid-layer-pattern; null: it is given, or nothing describes them. */
function patternOf(
	asides: readonly Aside[],
	raw: Raw,
): { readonly pattern: string; readonly why: string; readonly aside?: Aside } | null {
	const depths = lastOf(asides, "mtp-hybrid-override-pattern");
	const count = raw["mtp-num-layers"];
	const mtp = (layers: string) => `/${layers}`.repeat(wholeOf(count, 0));
	const main = raw["hybrid-layer-pattern"];
	if (typeof main === "string") {
		if (depths === undefined || main.includes("/")) return null;
		if (count === undefined) throw new RewriteError(depths, "it needs mtp-num-layers");
		return { pattern: main + mtp(depths.values[0] ?? ""), why: "--mtp-hybrid-override-pattern", aside: depths };
	}
	const layers = raw["num-layers"];
	if (typeof layers !== "number" || !Number.isSafeInteger(layers) || layers < 1 || layers > 4096) return null;
	const attention = lastOf(asides, "hybrid-attention-ratio");
	const mlp = lastOf(asides, "hybrid-mlp-ratio");
	const aside = attention ?? mlp;
	if (aside !== undefined) {
		const ratios = [attention, mlp].map((ratio) => (ratio === undefined ? 0 : numberOf(ratio, 0, 1)));
		if (ratios[0]! + ratios[1]! > 1) throw new RewriteError(aside, "allowed are ratios whose sum is at most 1");
		const pattern = patternOfRatios(layers, ratios[0]!, ratios[1]!) + mtp(depths?.values[0] ?? "");
		return { pattern, why: `num-layers ${layers} with its ratios`, aside };
	}
	const frequency = lastOf(asides, "moe-layer-freq");
	const linear = lastOf(asides, "linear-attention-freq");
	const hasExperts = wholeOf(raw["num-experts"], 0) > 0;
	const isMoe = layersBy(frequency, layers, (layer, every) => hasExperts && layer % every === 0);
	// Megatron's number n: n - 1 layers of linear attention before each of full attention.
	const isLinear = layersBy(linear, layers, (layer, every) => linear !== undefined && (layer + 1) % every !== 0);
	const full = raw["multi-latent-attention"] === true ? "+" : "*";
	const kinds = isMoe.map((moe, layer) => (isLinear[layer] ? "G" : full) + (moe && hasExperts ? "E" : "-"));
	const pattern = kinds.map((kind) => `[${kind}]`).join("") + mtp(depths?.values[0] ?? kinds.at(-1)!);
	return {
		pattern,
		why: `num-layers ${layers} without hybrid-layer-pattern is a GPT model`,
		...((frequency ?? linear) && { aside: frequency ?? linear! }),
	};
}

/**
 * The layers that moe-layer-freq or linear-attention-freq describes: a number, whose meaning `of` is, or a list of zeros and ones in
 * Python's notation, such as ([0]*3+[1]*58); without the flag the number is 1.
 */
function layersBy(
	frequency: Aside | undefined,
	layers: number,
	of: (layer: number, every: number) => boolean,
): boolean[] {
	const text = (frequency?.values ?? ["1"]).join("").replaceAll(/\s/g, "");
	if (frequency === undefined || /^[1-9]\d{0,3}$/.test(text)) {
		return Array.from({ length: layers }, (_, layer) => of(layer, Number(text)));
	}
	const term = /(?:\[([01](?:,[01])*)\]|\(([^()]*)\))(?:\*(\d{1,4}))?/g;
	const listed = (sum: string): number[] => {
		if (!/^x(\+x)*$/.test(sum.replaceAll(term, "x")))
			throw new RewriteError(
				frequency,
				"allowed is an integer, or lists of 0 and 1 joined by + and *, such as ([0]*3+[1]*58)",
			);
		return [...sum.matchAll(term)].flatMap(([, list, inner, times]) => {
			const items = list === undefined ? listed(inner!) : list.split(",").map(Number);
			return Array.from({ length: Number(times ?? 1) }, () => items).flat();
		});
	};
	const ones = listed(text);
	if (ones.length !== layers)
		throw new RewriteError(frequency, `it describes ${ones.length} layers, and num-layers is ${layers}`);
	return ones.map((one) => one === 1);
}

/** Rounds halves to the even neighbour, as Python does. */
function roundHalfEven(value: number): number {
	const below = Math.floor(value);
	const rest = value - below;
	return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

/**
 * Megatron's pattern of shares of attention and MLP layers (megatron/core/models/hybrid/hybrid_layer_allocation.py): attention layers
 * stand evenly between runs of Mamba layers; MLP layers then replace Mamba layers at even distances.
 */
function patternOfRatios(layers: number, attentionRatio: number, mlpRatio: number): string {
	const symbols = new Array<string>(layers).fill("M");
	const spread = (symbol: string, gap: number) => {
		let left = gap;
		for (const [layer, kind] of symbols.entries()) {
			if (kind !== "M") continue;
			if (left < 0.5) {
				symbols[layer] = symbol;
				left += gap;
			} else left -= 1;
		}
	};
	const attention = roundHalfEven(layers * attentionRatio);
	const mlp = roundHalfEven(layers * mlpRatio);
	spread("*", (layers - attention) / (attention + 1));
	if (mlp > 0) spread("-", (layers - attention - mlp) / mlp);
	return symbols.join("");
}

const cutters = {
	first: ["decoder-first-pipeline-num-layers", "num-layers-in-first-pipeline-stage"],
	last: ["decoder-last-pipeline-num-layers", "num-layers-in-last-pipeline-stage"],
	perVirtual: ["num-layers-per-virtual-pipeline-stage"],
	virtual: ["num-virtual-stages-per-pipeline-rank"],
	layout: ["pipeline-model-parallel-layout"],
} as const;

/** The pattern with | where a flag says that stages begin; null: no flag does. */
function cutPattern(
	asides: readonly Aside[],
	raw: Raw,
	pattern: string,
): { readonly pattern: string; readonly aside: Aside } | null {
	const aside = lastOf(asides, ...Object.values(cutters).flat());
	if (aside === undefined) return null;
	const slash = pattern.indexOf("/");
	const [main, mtp] = slash < 0 ? [pattern, ""] : [pattern.slice(0, slash), pattern.slice(slash)];
	const layers: string[] = main.match(/\[[^\]]*\]|[^|[\]]/g) ?? [];
	const counts = segmentsOf(asides, aside, layers.length, wholeOf(raw["llm-pp"], 1));
	const sum = counts.reduce((total, count) => total + count, 0);
	if (sum !== layers.length)
		throw new RewriteError(aside, `it places ${sum} layers, and the model has ${layers.length}`);
	const cut = counts.map((count) => layers.splice(0, count).join("")).join("|") + mtp;
	if (main.includes("|") && cut !== pattern)
		throw new RewriteError(aside, "hybrid-layer-pattern says with | where stages begin; allowed is one of both");
	return { pattern: cut, aside };
}

/** Layers of every segment; virtual stage v of stage s is segment v × stages + s. */
function segmentsOf(asides: readonly Aside[], aside: Aside, layers: number, stages: number): number[] {
	const find = (names: readonly string[]) => lastOf(asides, ...names);
	const layout = find(cutters.layout);
	if (layout !== undefined) return layoutSegments(layout);
	const [first, last, perVirtual, virtual] = [cutters.first, cutters.last, cutters.perVirtual, cutters.virtual].map(
		find,
	);
	const ends = [first, last].map((end) => (end === undefined ? null : numberOf(end, 1)));
	const inner = stages - ends.filter((end) => end !== null).length;
	const rest = layers - (ends[0] ?? 0) - (ends[1] ?? 0);
	const even = inner === 0 ? 0 : rest / inner;
	if (inner < 0 || !Number.isSafeInteger(even) || even < 0 || (inner === 0 && rest !== 0))
		throw new RewriteError(
			aside,
			`${Math.max(rest, 0)} layers do not lie evenly on ${Math.max(inner, 0)} other stages (llm-pp ${stages})`,
		);
	const stage = Array.from(
		{ length: stages },
		(_, at) => (at === 0 ? ends[0] : at === stages - 1 ? ends[1] : null) ?? even,
	);
	if (perVirtual !== undefined && (first !== undefined || last !== undefined))
		throw new RewriteError(perVirtual, "allowed only without numbers of layers of the first or last stage");
	const perStage = perVirtual === undefined ? 1 : even / numberOf(perVirtual, 1);
	const times = virtual === undefined ? perStage : numberOf(virtual, 1);
	const parts = stage.map((count) => count / times);
	if (!Number.isSafeInteger(times) || parts.some((part) => !Number.isSafeInteger(part)))
		throw new RewriteError(
			aside,
			`the stages of ${stage.join(", ")} layers have no equal virtual stages of that number`,
		);
	return Array.from({ length: times }, () => parts).flat();
}

/** Layers of every segment of a layout such as Et*3|(tt|)*29m|L: E embedding, t a layer, m an MTP depth, L the loss. */
function layoutSegments(aside: Aside): number[] {
	const unrolled = aside.values
		.join("")
		.replaceAll(/[\s,"']/g, "")
		.replaceAll(/\(([^)]+)\)\*(\d{1,4})/g, (_, part: string, times: string) => part.repeat(Number(times)))
		.replaceAll(/(.)\*(\d{1,4})/g, (_, part: string, times: string) => part.repeat(Number(times)));
	if (!/^E[t|]*m*L$/.test(unrolled))
		throw new RewriteError(
			aside,
			"allowed is E, layers t with | between stages, the MTP depths m of the last stage, and L",
		);
	return unrolled.split("|").map((stage) => stage.match(/t/g)?.length ?? 0);
}

/** The id of a special token in the tokenizer's folder or file. */
function imageTokenId(aside: Aside, tokenizer: unknown): number {
	const token = aside.values[0] ?? "";
	if (typeof tokenizer !== "string")
		throw new RewriteError(aside, "it needs tokenizer; here image-token-id is the token's id");
	const file = tokenizer.endsWith(".json") ? tokenizer : join(tokenizer, "tokenizer.json");
	if (!existsSync(file)) throw new RewriteError(aside, `${file} does not exist; here image-token-id is the token's id`);
	const text = readJsonText(file, tokenizerLimits);
	const { added_tokens: added } = JSON.parse(text) as { added_tokens?: readonly { id: number; content: string }[] };
	const id = added?.find(({ content }) => content === token)?.id;
	if (id === undefined)
		throw new RewriteError(aside, `${file} has no special token ${token}; here image-token-id is the token's id`);
	return id;
}
