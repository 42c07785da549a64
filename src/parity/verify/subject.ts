/** The subject of `mimo verify`, equal on all layouts: a configuration's modules, its optimizer, and one global batch. */
import { hasEncoder } from "../../config/derive.ts";
import { segmentLengths } from "../../config/hybrid-pattern.ts";
import { modulesOf } from "../../config/modules.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { lossTokens } from "../../data/microbatch.ts";
import { balanceOf } from "../../guests/balance/balance.ts";
import { distillationOf } from "../../guests/distillation/distillation.ts";
import { elasticGuest } from "../../guests/elastic/elastic.ts";
import { elasticOf } from "../../guests/elastic/from-configuration.ts";
import type { Guest } from "../../guests/guest.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { segmentsOf } from "../../models/language/pipeline-segments.ts";
import { pooledCoefficient } from "../../models/language/pooled-balancing.ts";
import type { PatchGrid } from "../../models/tower.ts";
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import { encoderConfig } from "../../models/vision/from-configuration.ts";
import { outputRows, type VitConfig } from "../../models/vit/config.ts";
import type { Topology } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { encoderKinds } from "../../train/encoder-kinds.ts";
import {
	dispatcherOf,
	freezesLanguage,
	lossMeanOf,
	moreEncoders,
	muonOf,
	overlapOf,
	visionOf,
} from "../../train/from-configuration.ts";
import type { RunSpecification } from "../../train/run-specification.ts";
import { drawSamples, type ImageOptions, type Sample } from "./samples.ts";

/** Options that change the order of work and no value. */
export type WorkOrder = Required<Pick<RunSpecification, "lateWeightGradients" | "overlap">>;

/** Plain 1F1B without late weight gradients. */
export const plainOrder: WorkOrder = { lateWeightGradients: false, overlap: null };

type Trained =
	| "encoders"
	| "language"
	| "guests"
	| "frozenLanguage"
	| "adam"
	| "muon"
	| "clipGrad"
	| "lossMean"
	| "dispatcher"
	| "seed";

/** A frozen teacher among the guests has drawn weights. */
export interface Subject extends Required<Pick<RunSpecification, Trained>> {
	/** Layers, and where pipelines cut them. */
	readonly pattern: string;
	/** In which order layouts compute; the reference computes one pass after the other, weight gradients with the others. */
	readonly order: WorkOrder;
	readonly learningRate: number;
	readonly weightDecay: number;
	/** As configured; a layout may need another. */
	readonly microBatchSize: number;
	readonly sequenceLength: number;
	readonly samples: readonly Sample[];
	/** Where they are from, as reports say it. */
	readonly origin: string;
}

/** Purpose of a subject: layouts are compared, or the participation policies in every layout. */
export type Purpose = "layouts" | "policies";

/** With random samples. `textOnly`: how many at the end of the batch have no image. */
export function subjectOf(c: TrainingConfiguration, textOnly: number, purpose: Purpose = "layouts"): Subject {
	refuseLayoutDependent(c, purpose);
	const samples = drawSamples({
		count: c.globalBatchSize,
		sequenceLength: c.seqLength,
		vocabularySize: c.vocabSize,
		seed: c.seed,
		gaps: !c.calculatePerTokenLoss,
		images: hasEncoder(c) ? imageOptions(c, textOnly) : null,
		others: modulesOf(c).map((module) => ({
			...{ name: module.name, id: module.placeholderTokenId, width: module.frameWidth },
			grid: encoderKinds[module.kind].grid(module),
		})),
	});
	return subjectWith(c, samples, `drawn from seed ${c.seed}`);
}

/** With the first global batch of the configured data. */
export async function subjectOfData(c: TrainingConfiguration, purpose: Purpose = "layouts"): Promise<Subject> {
	refuseLayoutDependent(c, purpose);
	const { readSamples } = await import("./data-samples.ts");
	const from = c.dataPath === null ? "" : ` (${c.dataPath})`;
	return subjectWith(c, await readSamples(c), `of the ${c.datasetProvider} data${from}`);
}

function subjectWith(c: TrainingConfiguration, samples: readonly Sample[], origin: string): Subject {
	return {
		encoders: [...(hasEncoder(c) ? [visionOf(c, drawnEncoder(encoderConfig(c)))] : []), ...moreEncoders(c)],
		language: drawn(hybridConfig(c)),
		pattern: c.hybridLayerPattern,
		guests: guestsOfSubject(c),
		frozenLanguage: freezesLanguage(c),
		adam: { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps },
		// Products in bf16 would round the same matrix, put together in another order, in another way.
		muon: muonOf({ ...c, muonFp32MatmulPrec: "high" }),
		clipGrad: c.clipGrad,
		lossMean: lossMeanOf(c),
		order: { lateWeightGradients: c.delayWgradCompute, overlap: overlapOf(c) },
		dispatcher: dispatcherOf(c),
		seed: c.seed,
		learningRate: c.lr,
		weightDecay: c.weightDecay,
		microBatchSize: c.microBatchSize,
		sequenceLength: c.seqLength,
		samples,
		origin,
	};
}

/**
 * The guests of a configuration, but for those that change nothing but when work is done. All microbatches of a step draw the same
 * submodel of an elastic model, so that layouts may cut the batch into other microbatches.
 */
function guestsOfSubject(c: TrainingConfiguration): Guest[] {
	const guests = [distillationOf(c, elasticOf(c)), elasticGuest(c, { period: 1 }), balanceOf(c)];
	return guests.filter((guest) => guest !== null);
}

/** Adapters and biases start with random values: with zeros most of their gradients would be zero too. */
function drawn(language: HybridConfig): HybridConfig {
	const { biases, lora } = language;
	return {
		...language,
		biases: { ...biases, start: "drawn" },
		lora: lora && { ...lora, start: "drawn" },
	};
}

function drawnEncoder({ tower, projector }: EncoderConfig): EncoderConfig {
	return {
		tower: { ...tower, lora: tower.lora && { ...tower.lora, start: "drawn" } },
		projector: { ...projector, lora: projector.lora && { ...projector.lora, start: "drawn" } },
	};
}

function imageOptions(c: TrainingConfiguration, textOnly: number): ImageOptions {
	const { tower } = encoderConfig(c);
	const { imageTokenId, dynamicResolution: dynamic, visionImageNewline: newline } = c;
	const grid = largestGrid(c, tower);
	return { tower, imageTokenId, grid, mrope: c.mropeSection !== null, dynamic, newline, textOnly };
}

/** The configured image; with dynamic resolution one whose rows take at most half of a sequence. */
function largestGrid(c: TrainingConfiguration, tower: VitConfig): PatchGrid {
	let [rows, columns] = [Math.floor(c.imgH / c.patchDim), Math.floor(c.imgW / c.patchDim)];
	if (!c.dynamicResolution) return { rows, columns };
	[rows, columns] = [rows - (rows % 2), columns - (columns % 2)];
	while (rows + columns > 4 && 2 * outputRows(tower, { rows, columns }) > c.seqLength) {
		if (rows >= columns) rows -= 2;
		else columns -= 2;
	}
	return { rows, columns };
}

/** Names of its encoders, in the order of a layout's sides. */
export function encoderNames({ encoders }: Pick<Subject, "encoders">): string[] {
	return encoders.map(({ parts }) => parts.name);
}

/** The run that a layout makes of it. */
export function specificationOn(subject: Subject, { language }: Topology): RunSpecification {
	const segments = segmentsOf(segmentLengths(subject.pattern, language.shape.pipeline));
	return { ...subject, segments };
}

/** Why a microbatch's losses depend on the samples that share it, as a sentence; null: they do not. */
export function poolingReason(subject: Pick<Subject, "language" | "lossMean" | "samples" | "guests">): string | null {
	const { language, lossMean, samples, guests } = subject;
	if (lossMean === "microbatches" && new Set(samples.map(({ text }) => lossTokens(text))).size > 1) {
		return "without calculate-per-token-loss a token weighs the less, the more loss tokens its microbatch has";
	}
	if (language.mtp !== null) {
		return "multi-token prediction weighs the loss of a depth by the loss tokens that a microbatch has for it";
	}
	const ofGuest = guests.find(({ pools }) => pools !== undefined);
	if (ofGuest) return ofGuest.pools!;
	const has = (type: string) => language.moe.balancing.some((loss) => loss.type === type);
	if (has("aux_loss")) {
		return "moe-router-load-balancing-type aux_loss balances the samples of a microbatch together";
	}
	if (language.moe.sinkhorn) {
		return "moe-router-load-balancing-type sinkhorn balances the samples of a microbatch together";
	}
	const counts = samples.map(({ text }) => text.lengths.length);
	const [fewest, most] = [Math.min(...counts), Math.max(...counts)];
	if (!has("seq_aux_loss") || fewest === most) return null;
	return `moe-router-load-balancing-type seq_aux_loss is the mean of a microbatch's sequences, and the packs of this batch hold ${fewest} to ${most}`;
}

/**
 * Samples of a microbatch, of the reference and of the layouts. The reference has single samples and the layouts at least
 * two, so that several sequences share a microbatch nowhere but where they are compared; both have the configured number
 * where a balancing loss depends on it, and all samples where one is pooled over lanes.
 */
export function microBatchSizes(subject: Subject): { readonly reference: number; readonly layouts: number } {
	const { microBatchSize, samples, language } = subject;
	// The loss is of what all lanes run together: here everything, in one microbatch of each.
	if (pooledCoefficient(language) !== null) return { reference: samples.length, layouts: samples.length };
	if (poolingReason(subject) !== null) return { reference: microBatchSize, layouts: microBatchSize };
	return { reference: 1, layouts: Math.max(2, microBatchSize) };
}

/** Refuses keys that make results depend on the layout by definition: a wide tolerance would hide mistakes. */
function refuseLayoutDependent(c: TrainingConfiguration, purpose: Purpose): void {
	if (purpose === "policies" && !hasEncoder(c)) {
		throw new UserError(
			"--policy compares what is done with the encoder's gradient; this configuration has no encoder.",
		);
	}
	const reasons = [
		c.moeRouterLoadBalancingType.includes("global_aux_loss") &&
			"moe-router-load-balancing-type global_aux_loss averages over the microbatches that its own lane has had so far",
		purpose === "layouts" &&
			hasEncoder(c) &&
			c.encoderGradParticipation === "corrected" &&
			"encoder-grad-participation corrected multiplies by a factor that counts encoder ranks (verify --policy shows its size)",
		c.gradReduceInBf16 && "grad-reduce-in-bf16 rounds what every replica adds",
		[c.expAvgDtype, c.expAvgSqDtype].includes("bf16") &&
			"moments in bf16 (exp-avg-dtype, exp-avg-sq-dtype) round a gradient's last bits up or down",
		c.fp8Format !== null &&
			c.fp8Modules.includes("projections") &&
			"fp8-modules projections rounds blocks of matrices and of rows that tensor parallelism cuts, and each value beside a tie in its own way",
		c.bf16 && "bf16 rounds every partial sum: verify compares in fp32 (bf16: false)",
	].filter((reason) => reason !== false);
	if (reasons.length > 0) throw new UserError(`Results depend on the layout here: ${reasons.join("; ")}.`);
}
