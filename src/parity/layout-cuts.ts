/** Sizes of a reference's model that a layout cuts: refused by name, before a rank starts, if it cannot divide them. */
import { dealsHeads } from "../config/context-parallel.ts";
import { deepStackObjection, type LayerKind } from "../config/hybrid-pattern.ts";
import type { HybridConfig } from "../models/language/config.ts";
import type { EncoderConfig } from "../models/vision/encoder.ts";
import type { NamedTopology } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

type Cut = readonly [what: string, length: number];

/** Throws a UserError that names what the layout cannot cut. */
export function requireCuts(
	{ name, topology }: NamedTopology,
	language: HybridConfig,
	encoder: EncoderConfig | null,
): void {
	const { tensor, context = 1, expert, expertTensor } = topology.language.shape;
	const { moe } = language;
	const experts = kindsOf(language).includes("moe");
	const all: readonly (readonly [what: string, size: number, cuts: readonly Cut[]])[] = [
		["the encoder's tp", topology.encoders[0]?.shape.tensor ?? 1, encoder ? encoderCuts(encoder) : []],
		[
			"the encoder's pp",
			topology.encoders[0]?.shape.pipeline ?? 1,
			encoder ? [["its layers", encoder.tower.layers]] : [],
		],
		["the language model's tp", tensor, languageCuts(language)],
		["ep", expert, experts ? [["the experts", moe.experts]] : []],
		["etp", expertTensor, experts ? [["the width of an expert", moe.ffnHiddenSize]] : []],
	];
	for (const [what, size, cuts] of all) {
		const uneven = cuts.filter(([, length]) => length % size !== 0).map(([cut, length]) => `${cut} (${length})`);
		if (uneven.length === 0) continue;
		throw new UserError(
			`Layout ${name}: ${what} is ${size}; allowed with this reference is a divisor of ${uneven.join(" and of ")}.`,
			exitCodes.usage,
		);
	}
	const [first] = evenSegments(language.pattern.length, topology.language.shape.pipeline);
	const objection = deepStackObjection(language.pattern, first!, encoder?.projector.deepstack.count ?? 0);
	if (objection !== null) throw new UserError(`Layout ${name}: ${objection}.`, exitCodes.usage);
	for (const [what, heads, groups] of headsOf(language)) {
		if (dealsHeads({ heads: heads / tensor, groups: groups / tensor }, context)) continue;
		throw new UserError(
			`Layout ${name}: cp is ${context}; allowed with this reference is a size that deals out the ${what} of a tensor-parallel rank evenly (${heads} in ${groups} groups).`,
			exitCodes.usage,
		);
	}
}

/** Heads of the kinds of layers that mix tokens, and the groups of them that share keys or states. */
function headsOf({ pattern, attention, mamba, linearAttention }: HybridConfig) {
	const all = [
		["attention", "attention heads", attention.heads, attention.queryGroups],
		["latentAttention", "attention heads", attention.heads, attention.heads],
		["mamba", "Mamba heads", mamba.heads, mamba.groups],
		["gdn", "value heads of Gated DeltaNet", linearAttention.valueHeads, linearAttention.keyHeads],
	] as const;
	return all.flatMap(([kind, ...heads]) => (pattern.includes(kind) ? [heads] : []));
}

/** Of the main part and of its prediction depths. */
const kindsOf = ({ pattern, mtp }: HybridConfig): readonly LayerKind[] => [...pattern, ...(mtp?.pattern ?? [])];

function languageCuts(config: HybridConfig): readonly Cut[] {
	const { paddedVocabularySize, attention, mamba, linearAttention, mlp, moe } = config;
	const there = kindsOf(config);
	const where = (kind: LayerKind, ...cuts: Cut[]) => (there.includes(kind) ? cuts : []);
	return [
		["the padded vocabulary", paddedVocabularySize],
		...where("attention", ["attention heads", attention.heads], ["query groups", attention.queryGroups]),
		...where("latentAttention", ["attention heads", attention.heads]),
		...where("mamba", ["Mamba heads", mamba.heads], ["Mamba groups", mamba.groups]),
		...where("gdn", ["key heads of Gated DeltaNet", linearAttention.keyHeads]),
		...where("mlp", ["the width of an MLP", mlp.ffnHiddenSize]),
		...where("moe", ["the width of the shared expert", moe.sharedExpertSize]),
	];
}

function encoderCuts({ tower, projector }: EncoderConfig): readonly Cut[] {
	return [
		["the width of the tower", tower.hiddenSize],
		["heads of the tower", tower.heads],
		["the width of its MLPs", tower.ffnHiddenSize],
		projector.type === "affine"
			? ["the width of the projector's output", projector.outputSize]
			: ["the inner width of the projector", projector.ffnHiddenSize],
	];
}

/** Layers of every pipeline segment: equal, or one more in the first segments. References describe no pipeline. */
export function evenSegments(layers: number, stages: number): number[] {
	return Array.from({ length: stages }, (_, stage) => Math.floor(layers / stages) + (stage < layers % stages ? 1 : 0));
}
